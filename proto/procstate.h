/* What a thread does, as the kernel tells it: for one that does not answer for itself. Reads /proc only. Any thread. */
#ifndef BOOST_PROTO_PROCSTATE_H
#define BOOST_PROTO_PROCSTATE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct proc_thread {
    pid_t tid;
    char name[32];    /* as the thread was named; control bytes are '?' */
    char state[32];   /* "S (sleeping)"; "" when the thread is gone */
    char wchan[96];   /* function of the kernel that it sleeps in; else why there is none */
    char syscall[96]; /* "7 poll"; "running"; else why there is none */
    char stack[512];  /* of the kernel, innermost first, " < " between; else why there is none */
};

/* One thread; false when it is gone. */
bool proc_thread_read(pid_t pid, pid_t tid, struct proc_thread *out);
/* The threads of a process, at most `room`, the main one first; returns how many there are, -1 when there is none. */
int proc_threads(pid_t pid, pid_t *tids, int room);
/* "poll", as this architecture numbers them; NULL when the number has no name here. */
const char *proc_syscall_name(long number);

#endif
