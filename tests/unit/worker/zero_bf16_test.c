/* zero 1 in bf16: each replica has moments and fp32 master weights of its pieces only, and bf16 weights are gathered.
 * State and losses are those of zero 0 to the last bit, in one go, after a resume, and after a resume under the other.
 * Compared are whole tensors, put together here from what all shards of a checkpoint hold. */
#include "tests/unit/worker/tiny_job.h"

#include "worker/safetensors.h"

enum { STEPS = 20, EVERY = 7, TENSORS = 512, TEXT = 1 << 16 };

/* ---- a checkpoint as whole tensors ---- */

struct whole {
    char name[80];
    int64_t rows, cols, covered;
    float *values;
};
struct checkpoint_state {
    struct whole tensors[TENSORS];
    int n;
};

static void drop(struct checkpoint_state *s)
{
    for (int i = 0; i < s->n; i++)
        free(s->tensors[i].values);
    free(s);
}

static struct whole *whole_of(struct checkpoint_state *s, const char *name, int64_t rows, int64_t cols)
{
    for (int i = 0; i < s->n; i++)
        if (!strcmp(s->tensors[i].name, name)) {
            assert_true(s->tensors[i].rows == rows && s->tensors[i].cols == cols);
            return &s->tensors[i];
        }
    assert_true(s->n < TENSORS);
    struct whole *w = &s->tensors[s->n++];
    snprintf(w->name, sizeof w->name, "%s", name);
    w->rows = rows;
    w->cols = cols;
    w->values = calloc((size_t)(rows * cols), sizeof(float));
    return w;
}

/* "rows,cols,row0,col0", and of a part "nrows,ncols,first" behind it. */
static int numbers_of(const char *text, int64_t out[7])
{
    int n = 0;
    for (char *end; n < 7; text = end + 1) {
        out[n++] = strtoll(text, &end, 10);
        if (*end != ',')
            break;
    }
    return n;
}

static void add_entry(struct checkpoint_state *s, const struct safetensors_file *f, const struct safetensors_entry *e)
{
    char key[128];
    int64_t at[7];
    size_t len = strlen(e->name);
    bool moment = len > 2 && (!strcmp(e->name + len - 2, ".m") || !strcmp(e->name + len - 2, ".v"));
    struct error err;
    snprintf(key, sizeof key, "shard:%.*s", (int)(len - (moment ? 2 : 0)), e->name);
    const char *text = safetensors_meta(f, key);
    assert_non_null(text);
    int n = numbers_of(text, at);
    assert_true(n == (e->dims == 2 ? 4 : 7));
    assert_int_equal(e->dtype, DTYPE_F32); /* masters and moments, not what the products take */
    int64_t ncols = n == 7 ? at[5] : e->shape[1], first = n == 7 ? at[6] : 0;
    int64_t count = (int64_t)((e->end - e->begin) / sizeof(float));
    struct whole *w = whole_of(s, e->name, at[0], at[1]);
    float *values = malloc((size_t)count * sizeof *values);
    assert_int_equal(safetensors_read(f, e, values, &err), 0);
    for (int64_t k = 0; k < count; k++) {
        int64_t row = at[2] + (first + k) / ncols, col = at[3] + (first + k) % ncols;
        assert_true(row < w->rows && col < w->cols);
        w->values[row * w->cols + col] = values[k];
    }
    w->covered += count;
    free(values);
}

static struct checkpoint_state *read_state(const char *checkpoint, int world)
{
    struct checkpoint_state *s = calloc(1, sizeof *s);
    for (int r = 0; r < world; r++) {
        char path[400];
        struct safetensors_file f;
        struct error err;
        snprintf(path, sizeof path, "%s/rank-%05d-of-%05d.safetensors", checkpoint, r, world);
        assert_int_equal(safetensors_open(&f, path, &err), 0);
        for (size_t i = 0; i < f.n; i++)
            add_entry(s, &f, &f.entries[i]);
        safetensors_close(&f);
    }
    for (int i = 0; i < s->n; i++) /* each element lies in one shard */
        assert_true(s->tensors[i].covered == s->tensors[i].rows * s->tensors[i].cols);
    return s;
}

static void same_state(const char *what, const struct checkpoint_state *a, const struct checkpoint_state *b)
{
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        const struct whole *x = &a->tensors[i], *y = NULL;
        for (int k = 0; k < b->n && !y; k++)
            y = strcmp(x->name, b->tensors[k].name) ? NULL : &b->tensors[k];
        assert_true(y && x->rows == y->rows && x->cols == y->cols);
        if (memcmp(x->values, y->values, (size_t)(x->rows * x->cols) * sizeof(float)))
            fail_msg("%s: %s differs", what, x->name);
    }
}

/* ---- jobs ---- */

struct layout {
    int tp, dp;
    const char *more; /* a further assignment */
};

struct outcome {
    char dir[96];
    double loss[STEPS + 1];
    bool have[STEPS + 1];
    struct checkpoint_state *end;
};

/* A whole job in <base>/<name>, or from a checkpoint on. */
static void run_job(const char *base, const char *name, const struct layout *l, int zero, const char *resume,
                    struct outcome *out)
{
    static char text[TEXT];
    char run[128], dp[32], zeros[32], newest[320];
    int fd;
    size_t len = 0;
    struct error err;
    *out = (struct outcome){.end = NULL};
    snprintf(out->dir, sizeof out->dir, "%s/%s", base, name);
    snprintf(run, sizeof run, "%s/run", out->dir);
    snprintf(dp, sizeof dp, "parallel.dp=%d", l->dp);
    snprintf(zeros, sizeof zeros, "parallel.zero=%d", zero);
    assert_int_equal(fs_make_dirs(out->dir, 0755, &err), 0);
    tiny_job_write(out->dir, l->tp, STEPS, "precision: BF16", "every_steps: 7");
    const char *const set[] = {dp, zeros, "parallel.micro_batch=1", l->more};
    pid_t pid = tiny_job_start(out->dir, run, resume, set, sizeof set / sizeof *set, &fd);
    for (ssize_t n; len < sizeof text - 1 && (n = read(fd, text + len, sizeof text - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = '\0';
    close(fd);
    if (tiny_job_end(pid))
        fail_msg("%s: %s", name, text);
    tiny_job_metric(run, "loss", out->loss, out->have, STEPS);
    assert_true(tiny_job_newest(out->dir, l->tp * l->dp, STEPS, newest, sizeof newest));
    out->end = read_state(newest, l->tp * l->dp);
}

static void same_run(const char *what, const struct outcome *a, const struct outcome *want)
{
    int steps = 0;
    for (int n = 1; n <= STEPS; n++) {
        steps += a->have[n];
        if (a->have[n] && a->loss[n] != want->loss[n])
            fail_msg("%s: the loss of step %d is %.17g, not %.17g", what, n, a->loss[n], want->loss[n]);
    }
    assert_true(a->have[STEPS] && steps >= EVERY - 1);
    same_state(what, a->end, want->end);
}

/* Masters that bf16 could hold would show nothing. */
static void masters_are_finer_than_bf16(const struct checkpoint_state *s)
{
    int64_t finer = 0, all = 0;
    for (int i = 0; i < s->n; i++)
        for (int64_t k = 0; k < s->tensors[i].rows * s->tensors[i].cols; k++, all++) {
            uint32_t bits;
            memcpy(&bits, &s->tensors[i].values[k], sizeof bits);
            finer += (bits & 0xffff) != 0;
        }
    assert_true(finer > all / 2);
}

static void every_way_is_zero_0(const struct layout *l)
{
    char base[64], from[2][320];
    struct outcome runs[2], resumed;
    struct error err;
    snprintf(base, sizeof base, "/tmp/boost-zero-XXXXXX");
    assert_non_null(mkdtemp(base));
    for (int zero = 0; zero < 2; zero++) {
        run_job(base, zero ? "one" : "none", l, zero, NULL, &runs[zero]);
        assert_true(tiny_job_newest(runs[zero].dir, l->tp * l->dp, 2 * EVERY, from[zero], sizeof from[zero]));
    }
    masters_are_finer_than_bf16(runs[0].end);
    same_run("zero 1", &runs[1], &runs[0]);
    for (int i = 0; i < 4; i++) {
        static const char *const names[] = {"zero 0 resumed", "zero 0 resumed under zero 1",
                                            "zero 1 resumed under zero 0", "zero 1 resumed"};
        char name[16];
        snprintf(name, sizeof name, "from-%d", i);
        run_job(base, name, l, i & 1, from[i >> 1], &resumed);
        assert_false(resumed.have[1]);
        same_run(names[i], &resumed, &runs[0]);
        drop(resumed.end);
    }
    drop(runs[0].end);
    drop(runs[1].end);
    assert_int_equal(fs_remove_tree(base, &err), 0);
}

static void replicas(void **state)
{
    (void)state;
    every_way_is_zero_0(&(struct layout){1, 2, "optimizer.grad_clip=0.5"});
    every_way_is_zero_0(&(struct layout){1, 4, "model.tie_embeddings=true"});
}

static void replicas_of_slices(void **state)
{
    (void)state;
    every_way_is_zero_0(&(struct layout){2, 2, "model.tie_embeddings=true"});
    every_way_is_zero_0(&(struct layout){2, 2, "model.factorization=SVD"});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replicas),
        cmocka_unit_test(replicas_of_slices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
