/* Standard output as a user's shell has it: a pager that was closed, a disk that is full. */
#ifndef BOOST_CTL_OUT_H
#define BOOST_CTL_OUT_H

#include <stdbool.h>

/* Before anything is printed. A closed pipe then fails a write and kills nobody; see out_flush(). */
void out_begin(void);
/* Whether all that was printed so far is out. */
bool out_try(void);
/* As out_try(); but a pipe whose reader has gone ends boostctl as it ends every program, by SIGPIPE and without a word,
 * unless its parent had that signal ignored. */
void out_flush(void);
/* At the end: `code`, or EXIT_REFUSED with a message where it would be a success and the output is not all out. */
int out_end(int code);

#endif
