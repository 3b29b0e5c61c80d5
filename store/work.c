/* Work between the loop's thread and the store's: lists, answers, threads. */
#include <errno.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store/internal.h"

void store_work_list_init(struct store_work_list *list)
{
    list->head = NULL;
    list->tail = &list->head;
}

void store_work_list_add(struct store_work_list *list, struct store_work *work)
{
    work->next = NULL;
    *list->tail = work;
    list->tail = &work->next;
}

void store_work_list_join(struct store_work_list *to, struct store_work_list *from)
{
    if (!from->head)
        return;
    *to->tail = from->head;
    to->tail = from->tail;
    store_work_list_init(from);
}

void store_answers_post(struct store_answers *a, struct store_work_list *list)
{
    if (!list->head)
        return;
    pthread_mutex_lock(&a->mutex);
    store_work_list_join(&a->list, list);
    pthread_mutex_unlock(&a->mutex);
    /* Can only fail when the counter is full, and then the descriptor is readable anyway. */
    (void)!eventfd_write(a->fd, 1);
}

int store_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg, struct error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int errnum = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (errnum)
        return error_errno(err, errnum, "start thread %s", name);
    pthread_setname_np(*thread, name);
    return ERR_OK;
}
