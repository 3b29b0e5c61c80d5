/* ckpt_weights.h: a directory of Hugging Face's transformers, or of the public CoLA code, as a checkpoint. */
#include <stdlib.h>

#include "worker/ckpt_weights.h"
#include "worker/hf.h"

static int rows_there(void *arg, const struct tensor_item *item, int64_t row0, int64_t nrows, float *out,
                      struct error *err)
{
    struct plan_tensor t;
    plan_tensor_at(hf_plan(arg), 0, item->source[0], &t);
    t.row0 = row0;
    t.nrows = nrows;
    return hf_read(arg, &t, out, err);
}

int hf_import(const char *from, const char *to, char *out, size_t cap, struct error *err)
{
    struct hf_source *s = NULL;
    struct tensor_item *items = NULL;
    size_t n = 0;
    int rc = hf_open(from, &s, err);
    if (!rc)
        rc = plan_items(hf_plan(s), &items, &n, err);
    for (size_t i = 0; i < n && !rc; i++)
        items[i].source[0] = (int64_t)i;
    if (!rc)
        rc = ckpt_write_weights(to, 0, hf_spec(s), items, n, rows_there, s, out, cap, err);
    free(items);
    hf_close(s);
    return rc;
}
