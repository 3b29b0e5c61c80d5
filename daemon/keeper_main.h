/* The command line of boost-keeper, apart from main() so that tests can run it. */
#ifndef BOOST_DAEMON_KEEPER_MAIN_H
#define BOOST_DAEMON_KEEPER_MAIN_H

/* boost-keeper RUN_DIR: detaches into a session of its own and keeps the ranks of the attempt that
 * <RUN_DIR>/start.pb describes. The first process ends once the keeper is on its own (0) or could not
 * start (1, reason in keeper.log); the keeper itself returns at the end of the attempt. */
int keeper_main(int argc, char **argv);

#endif
