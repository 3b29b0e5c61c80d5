/* The command line of boost-agent, apart from main() so that tests can run it. */
#ifndef BOOST_DAEMON_AGENT_MAIN_H
#define BOOST_DAEMON_AGENT_MAIN_H

/* Returns the exit status: 0; 1 cannot run (reason on standard error); 2 usage or configuration; 5 the state
 * directory is another agent's, or attempts of another node's name run in it. */
int agent_main(int argc, char **argv);

#endif
