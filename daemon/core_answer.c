/* What a user is told whose request is a change: that it is done once it is durable, or that it waits for a store that
 * cannot write. */
#include <stdlib.h>

#include "daemon/core_internal.h"

struct answer *answer_new(core_text_reply_fn reply, void *arg)
{
    struct answer *x = calloc(1, sizeof *x);
    if (x)
        *x = (struct answer){.reply = reply, .arg = arg};
    return x;
}

struct error answer_late_error(const struct error *why)
{
    struct error late = *why;
    error_context(&late, "not done yet");
    error_hint(&late, "it is done by itself as soon as the state directory can be written; running jobs go on");
    return late;
}

static void durable(struct core *c, void *arg, int rc, const struct error *err)
{
    struct answer *x = arg;
    (void)c;
    if (!x->replied)
        x->reply(x->arg, rc, rc ? err : NULL, x->text);
}

static void waits(struct core *c, void *arg, const struct error *err)
{
    struct answer *x = arg;
    struct error late = answer_late_error(err);
    (void)c;
    x->replied = true;
    x->reply(x->arg, (int)late.code, &late, "");
}

void answer_when_durable(struct core *c, struct answer *x)
{
    after_durable_or_late(c, durable, waits, x, free);
}
