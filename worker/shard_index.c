/* shard_index.h */
#include "worker/shard_index.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "worker/checkpoint_internal.h"

enum {
    OPEN_FILES = 16,   /* kept open between reads */
    SCATTER = 1 << 20, /* bytes read at once that then go to several places */
    AREAS = 3,         /* of a run of elements: a row's end, whole rows, a row's beginning */
    FILES_TOLD = 4,    /* by a message */
};

/* A rectangle of a whole tensor, in a run of elements where its first is number `at` and its rows are `stride` apart.
 */
struct area {
    int64_t row0, col0, nrows, ncols;
    int64_t at, stride;
};

/* An area that a shard holds. */
struct piece {
    int64_t i; /* the engine's tensor */
    int kind, rank;
    struct area area;
    uint64_t data; /* where in the file the run begins */
};

/* A tensor of the model, held by this rank or not. */
struct known {
    char name[PLAN_NAME_MAX];
    int64_t rows, cols;
    int64_t i; /* of the engine; -1: another stage's */
    bool seen[SHARD_KINDS];
};

struct shard_index {
    const char *dir;
    const struct plan *plan;
    struct shard_view view;
    int rank, world; /* of the job; ranks that wrote the checkpoint */
    struct safetensors_file shared;
    char *choices;
    struct known *known; /* by name */
    size_t n_known;
    struct piece *pieces; /* by tensor, kind and place */
    size_t n, room;
    void *scatter;
    struct {
        int rank, fd; /* fd -1: none */
    } open[OPEN_FILES];
};

/* ---- areas ---- */

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Elements [first, first + count) of the slice [.., ncols] at (row0, col0); how many areas. */
static int areas_of(int64_t row0, int64_t col0, int64_t ncols, int64_t first, int64_t count, struct area out[AREAS])
{
    int n = 0;
    int64_t at = 0;
    while (at < count) {
        int64_t row = (first + at) / ncols, col = (first + at) % ncols, left = count - at;
        int64_t rows = col || left < ncols ? 1 : left / ncols;
        int64_t cols = smaller(left, ncols - col);
        out[n++] = (struct area){row0 + row, col0 + col, rows, cols, at, ncols};
        at += rows * cols;
    }
    return n;
}

/* The rectangle that both cover, placed as in a's run; false: none. */
static bool meet(const struct area *a, const struct area *b, struct area *out)
{
    int64_t row0 = larger(a->row0, b->row0), col0 = larger(a->col0, b->col0);
    int64_t row1 = smaller(a->row0 + a->nrows, b->row0 + b->nrows);
    int64_t col1 = smaller(a->col0 + a->ncols, b->col0 + b->ncols);
    if (row0 >= row1 || col0 >= col1)
        return false;
    *out = (struct area){
        row0, col0, row1 - row0, col1 - col0, a->at + (row0 - a->row0) * a->stride + col0 - a->col0, a->stride};
    return true;
}

/* ---- the shards of a directory ---- */

/* Ranks of a name "rank-00000-of-00002.safetensors"; 0 for another. */
static int world_of_name(const char *name)
{
    char *end, *of = strstr(name, "-of-");
    if (strncmp(name, "rank-", 5) || !of)
        return 0;
    long n = strtol(of + 4, &end, 10);
    return !strcmp(end, ".safetensors") && n > 0 && n <= INT_MAX ? (int)n : 0;
}

static int find_world(struct shard_index *x, struct error *err)
{
    DIR *d = opendir(x->dir);
    int rc = ERR_OK;
    if (!d && errno != ENOENT)
        return error_errno(err, errno, "cannot read the directory %s", x->dir);
    for (struct dirent *e; d && !rc && (e = readdir(d));) {
        int world = world_of_name(e->d_name);
        if (world && x->world && world != x->world)
            rc = error_set(err, ERR_CORRUPT, "checkpoint %s has shards of %d ranks and of %d", x->dir, x->world, world);
        x->world = world ? world : x->world;
    }
    if (d)
        closedir(d);
    if (!rc && !x->world) /* verified before the attempt, gone since: another one may do */
        rc = error_set(err, ERR_CORRUPT, "checkpoint %s has no shards (rank-*-of-*.safetensors)", x->dir);
    return rc;
}

static int shard_path(const struct shard_index *x, int rank, char out[PATH_MAX], struct error *err)
{
    char file[64];
    shard_file_name(file, rank, x->world);
    return fs_join(out, PATH_MAX, err, x->dir, file);
}

/* The checks of a shard by itself, and that it belongs to the same checkpoint as the first. */
static int check_shard(const struct shard_index *x, const struct safetensors_file *f, int rank, struct error *err)
{
    static const char *const equal[] = {"layout", "holds", "job",     "attempt",     "step",      "adam_t", "samples",
                                        "tokens", "skipped", "skipped_run", "data_seed", "spike"};
    const char *format = safetensors_meta(f, "format"), *says = safetensors_meta(f, "rank");
    char number[16];
    snprintf(number, sizeof number, "%d", rank);
    if (!format || strcmp(format, "boost.shard/1") || !safetensors_meta(f, "layout"))
        return error_set(err, ERR_CORRUPT, "%s is not a shard of a BOOST checkpoint", f->path);
    if (!says || strcmp(says, number))
        return error_set(err, ERR_CORRUPT, "%s was written by rank %s", f->path, says ? says : "?");
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++) {
        const char *a = safetensors_meta(&x->shared, equal[i]), *b = safetensors_meta(f, equal[i]);
        if (a == b || (a && b && !strcmp(a, b)))
            continue;
        error_set(err, ERR_CORRUPT, "shards are of different checkpoints: %s has %s %s, %s has %s", x->shared.path,
                  equal[i], a ? a : "(none)", f->path, b ? b : "(none)");
        return error_hint(err, "resume from another checkpoint");
    }
    return ERR_OK;
}

/* ---- the model's tensors ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct known *)a)->name, ((const struct known *)b)->name);
}

static struct known *find_known(const struct shard_index *x, const char *name)
{
    struct known key = {.i = -1};
    if (strlen(name) >= sizeof key.name)
        return NULL;
    snprintf(key.name, sizeof key.name, "%s", name);
    return bsearch(&key, x->known, x->n_known, sizeof key, by_name);
}

static int list_known(struct shard_index *x, struct error *err)
{
    x->n_known = (size_t)plan_tensor_count(x->plan);
    x->known = calloc(x->n_known, sizeof *x->known);
    if (!x->known)
        return error_set(err, ERR_NOMEM, "no memory for the names of %zu tensors", x->n_known);
    for (size_t i = 0; i < x->n_known; i++) {
        struct plan_tensor t;
        plan_tensor_at(x->plan, x->rank, (int64_t)i, &t);
        x->known[i] = (struct known){.rows = t.rows, .cols = t.cols, .i = -1};
        snprintf(x->known[i].name, sizeof x->known[i].name, "%s", t.name);
    }
    qsort(x->known, x->n_known, sizeof *x->known, by_name);
    for (int64_t i = 0; i < x->view.count; i++) {
        struct state_tensor t;
        x->view.tensor(x->view.of, i, STATE_WEIGHT, &t);
        struct known *k = find_known(x, t.tensor.name);
        if (!k)
            return error_set(err, ERR_INTERNAL, "the plan has no tensor %s", t.tensor.name);
        k->i = i;
    }
    return ERR_OK;
}

static int other_model(struct error *err)
{
    return error_hint(err, "the model section of the job must be that of the checkpoint");
}

/* The tensor and kind that an entry's name stands for; NULL: the model has none. */
static struct known *known_of(const struct shard_index *x, const char *entry, int *kind)
{
    char name[SHARD_NAME_BYTES], want[SHARD_NAME_BYTES];
    size_t len = strlen(entry);
    if (len >= sizeof name)
        return NULL;
    for (*kind = 0; *kind < SHARD_KINDS; ++*kind) {
        shard_entry_name(want, "", *kind);
        size_t suffix = strlen(want);
        if (len <= suffix || strcmp(entry + len - suffix, want))
            continue;
        snprintf(name, sizeof name, "%.*s", (int)(len - suffix), entry);
        struct known *k = find_known(x, name);
        if (k)
            return k;
    }
    return NULL;
}

/* ---- pieces ---- */

enum { SLICE_NUMBERS = 4, PART_NUMBERS = 7 };

/* The numbers of "rows,cols,row0,col0[,nrows,ncols,first]"; how many, 0 for another text. */
static int numbers_of(const char *text, int64_t out[PART_NUMBERS])
{
    for (int n = 0; text && n < PART_NUMBERS;) {
        char *end;
        errno = 0;
        out[n++] = strtoll(text, &end, 10);
        if (end == text || errno || out[n - 1] < 0)
            return 0;
        if (!*end)
            return n;
        if (*end != ',')
            return 0;
        text = end + 1;
    }
    return 0;
}

/* Where an entry lies in its whole tensor. */
static int entry_areas(const struct safetensors_file *f, const struct safetensors_entry *e, const struct known *k,
                       struct area out[AREAS], int *n, struct error *err)
{
    char key[SHARD_NAME_BYTES + 8];
    int64_t v[PART_NUMBERS];
    snprintf(key, sizeof key, "shard:%s", k->name);
    const char *text = safetensors_meta(f, key);
    int numbers = numbers_of(text, v);
    if ((numbers != SLICE_NUMBERS || e->dims != 2) && (numbers != PART_NUMBERS || e->dims != 1))
        return error_set(err, ERR_CORRUPT, "%s: metadata '%s' does not say where the tensor lies", f->path, key);
    if (v[0] != k->rows || v[1] != k->cols) {
        error_set(err, ERR_INVALID,
                  "%s: tensor %s is of [%" PRId64 ", %" PRId64 "], this job needs [%" PRId64 ", %" PRId64 "]", f->path,
                  e->name, v[0], v[1], k->rows, k->cols);
        return other_model(err);
    }
    bool part = e->dims == 1;
    int64_t nrows = part ? v[4] : e->shape[0], ncols = part ? v[5] : e->shape[1], first = part ? v[6] : 0;
    bool inside = v[2] <= v[0] && nrows <= v[0] - v[2] && v[3] <= v[1] && ncols <= v[1] - v[3];
    int64_t count = part ? e->shape[0] : inside ? nrows * ncols : 0;
    if (!inside || first > nrows * ncols || count > nrows * ncols - first)
        return error_set(err, ERR_CORRUPT, "%s: metadata '%s' is impossible: %s", f->path, key, text);
    *n = areas_of(v[2], v[3], ncols, first, count, out);
    return ERR_OK;
}

static int add_piece(struct shard_index *x, const struct piece *p, struct error *err)
{
    if (x->n == x->room) {
        size_t room = x->room ? 2 * x->room : 256;
        struct piece *more = realloc(x->pieces, room * sizeof *more);
        if (!more)
            return error_set(err, ERR_NOMEM, "no memory for the index of a checkpoint");
        x->pieces = more;
        x->room = room;
    }
    x->pieces[x->n++] = *p;
    return ERR_OK;
}

/* What this rank needs of an entry. */
static int add_entry(struct shard_index *x, const struct safetensors_file *f, int rank,
                     const struct safetensors_entry *e, struct error *err)
{
    int kind, n = 0;
    struct area areas[AREAS], common;
    struct known *k = known_of(x, e->name, &kind);
    if (!k) {
        error_set(err, ERR_INVALID, "%s holds tensor %s, which this job's model does not have", f->path, e->name);
        return other_model(err);
    }
    k->seen[kind] = true;
    int rc = entry_areas(f, e, k, areas, &n, err);
    if (rc || k->i < 0)
        return rc;
    struct state_tensor t;
    x->view.tensor(x->view.of, k->i, shard_kinds[kind], &t);
    if (e->dtype != t.dtype) {
        error_set(err, ERR_INVALID, "%s: tensor %s is %s, this job keeps it as %s", f->path, e->name,
                  dtype_name(e->dtype), dtype_name(t.dtype));
        return error_hint(err, "resume with the run.precision that wrote the checkpoint");
    }
    const struct plan_tensor *p = &t.tensor;
    const struct area slice = {p->row0, p->col0, p->nrows, p->ncols, 0, p->ncols};
    for (int a = 0; a < n && !rc; a++)
        if (meet(&areas[a], &slice, &common))
            rc = add_piece(x, &(struct piece){k->i, kind, rank, areas[a], f->data_at + e->begin}, err);
    return rc;
}

static int add_shard(struct shard_index *x, int rank, struct error *err)
{
    char path[PATH_MAX];
    struct safetensors_file f;
    int rc = shard_path(x, rank, path, err);
    if (!rc)
        rc = safetensors_open(&f, path, err);
    if (rc == ERR_NOT_FOUND)
        return error_set(err, ERR_CORRUPT, "checkpoint %s lacks the shard %s", x->dir, strrchr(path, '/') + 1);
    if (rc)
        return rc;
    bool first = !x->shared.path;
    if (first)
        x->shared = f;
    rc = check_shard(x, &f, rank, err);
    for (size_t i = 0; i < f.n && !rc; i++)
        rc = add_entry(x, &f, rank, &f.entries[i], err);
    const char *choices = safetensors_meta(&f, "choices");
    if (!rc && rank == x->rank && choices && shard_index_same_layout(x)) {
        x->choices = strdup(choices);
        rc = x->choices ? ERR_OK : error_set(err, ERR_NOMEM, "out of memory");
    }
    if (!first)
        safetensors_close(&f);
    return rc;
}

bool shard_index_weights_only(const struct shard_index *x)
{
    const char *says = safetensors_meta(&x->shared, "holds");
    return says && !strcmp(says, "weights");
}

/* Every tensor of the model is in some shard. */
static int check_seen(const struct shard_index *x, struct error *err)
{
    int kinds = shard_index_weights_only(x) ? 1 : SHARD_KINDS;
    for (size_t i = 0; i < x->n_known; i++)
        for (int kind = 0; kind < kinds; kind++) {
            char name[SHARD_NAME_BYTES];
            if (x->known[i].seen[kind])
                continue;
            shard_entry_name(name, x->known[i].name, kind);
            error_set(err, ERR_INVALID, "checkpoint %s has no tensor %s", x->dir, name);
            return other_model(err);
        }
    return ERR_OK;
}

static int order(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

static int by_place(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;
    int o = order(x->i, y->i);
    o = o ? o : order(x->kind, y->kind);
    o = o ? o : order(x->area.row0, y->area.row0);
    o = o ? o : order(x->area.col0, y->area.col0);
    return o ? o : order(x->rank, y->rank);
}

int shard_index_open_view(const char *dir, const struct plan *plan, const struct shard_view *view, int rank,
                          struct shard_index **out, struct error *err)
{
    struct shard_index *x = calloc(1, sizeof *x);
    if (!x)
        return error_set(err, ERR_NOMEM, "out of memory");
    x->dir = dir;
    x->plan = plan;
    x->view = *view;
    x->rank = rank;
    x->shared.fd = -1;
    for (int i = 0; i < OPEN_FILES; i++)
        x->open[i].fd = -1;
    x->scatter = malloc(SCATTER);
    int rc = x->scatter ? find_world(x, err) : error_set(err, ERR_NOMEM, "out of memory");
    if (!rc)
        rc = list_known(x, err);
    for (int r = 0; r < x->world && !rc; r++)
        rc = add_shard(x, r, err);
    if (!rc)
        rc = check_seen(x, err);
    if (rc) {
        shard_index_close(x);
        return rc;
    }
    if (x->n)
        qsort(x->pieces, x->n, sizeof *x->pieces, by_place);
    *out = x;
    return ERR_OK;
}

static void tensor_of_engine(const void *of, int64_t i, enum state_kind kind, struct state_tensor *out)
{
    engine_tensor(of, i, kind, out);
}

int shard_index_open(const char *dir, const struct plan *plan, const struct engine *engine, int rank,
                     struct shard_index **out, struct error *err)
{
    const struct shard_view view = {engine_tensor_count(engine), tensor_of_engine, engine};
    return shard_index_open_view(dir, plan, &view, rank, out, err);
}

void shard_index_close(struct shard_index *x)
{
    if (!x)
        return;
    for (int i = 0; i < OPEN_FILES; i++)
        if (x->open[i].fd >= 0)
            close(x->open[i].fd);
    safetensors_close(&x->shared);
    free(x->choices);
    free(x->known);
    free(x->pieces);
    free(x->scatter);
    free(x);
}

const struct safetensors_file *shard_index_shared(const struct shard_index *x)
{
    return &x->shared;
}

const char *shard_index_layout(const struct shard_index *x)
{
    return safetensors_meta(&x->shared, "layout");
}

bool shard_index_same_layout(const struct shard_index *x)
{
    char ours[64];
    snprintf(ours, sizeof ours, "tp=%d pp=%d dp=%d", x->plan->tp, x->plan->pp, x->plan->dp);
    return !strcmp(shard_index_layout(x), ours);
}

const char *shard_index_choices(const struct shard_index *x)
{
    return x->choices;
}

/* ---- checking what is there ---- */

/* The pieces of a tensor's state, which are next to each other. */
static const struct piece *pieces_of(const struct shard_index *x, int64_t i, int kind, size_t *n)
{
    size_t low = 0, high = x->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct piece *p = &x->pieces[mid];
        if (p->i < i || (p->i == i && p->kind < kind))
            low = mid + 1;
        else
            high = mid;
    }
    for (*n = 0; low + *n < x->n && x->pieces[low + *n].i == i && x->pieces[low + *n].kind == kind;)
        ++*n;
    return x->pieces + low;
}

static int check_once(const struct shard_index *x, const char *name, const struct piece *p, size_t n, struct error *err)
{
    struct area common;
    for (size_t a = 0; a < n; a++)
        for (size_t b = a + 1; b < n && p[b].area.row0 < p[a].area.row0 + p[a].area.nrows; b++) {
            if (!meet(&p[a].area, &p[b].area, &common))
                continue;
            char one[64], other[64];
            shard_file_name(one, p[a].rank, x->world);
            shard_file_name(other, p[b].rank, x->world);
            return error_set(err, ERR_CORRUPT,
                             "checkpoint %s has rows %" PRId64 " to %" PRId64 ", columns %" PRId64 " to %" PRId64
                             " of tensor %s twice, in %s and %s",
                             x->dir, common.row0, common.row0 + common.nrows - 1, common.col0,
                             common.col0 + common.ncols - 1, name, one, other);
        }
    return ERR_OK;
}

/* Elements of an area that pieces hold; they do not overlap. */
static int64_t held(const struct area *a, const struct piece *p, size_t n)
{
    struct area common;
    int64_t sum = 0;
    for (size_t k = 0; k < n; k++)
        if (meet(a, &p[k].area, &common))
            sum += common.nrows * common.ncols;
    return sum;
}

static int incomplete(const struct shard_index *x, const char *name, const struct area *a, const struct piece *p,
                      size_t n, struct error *err)
{
    struct area row = *a;
    row.nrows = 1;
    while (row.row0 < a->row0 + a->nrows - 1 && held(&row, p, n) == row.ncols)
        row.row0++;
    int64_t first = row.row0;
    while (row.row0 < a->row0 + a->nrows && held(&row, p, n) < row.ncols)
        row.row0++;
    char files[FILES_TOLD * 64] = "no shard";
    int told = 0;
    size_t used = 0;
    for (size_t k = 0; k < n && told < FILES_TOLD; k++) {
        char file[64];
        shard_file_name(file, p[k].rank, x->world);
        if (!strstr(files, file))
            used += (size_t)snprintf(files + used, sizeof files - used, "%s%s", told++ ? ", " : "", file);
    }
    error_set(err, ERR_CORRUPT,
              "checkpoint %s has not all of tensor %s: rows %" PRId64 " to %" PRId64 ", columns %" PRId64 " to %" PRId64
              " lack elements; other parts are in %s",
              x->dir, name, first, row.row0 - 1, a->col0, a->col0 + a->ncols - 1, files);
    return error_hint(err, "resume from another checkpoint");
}

/* ---- reading ---- */

static int file_of(struct shard_index *x, int rank, const char *path, int *fd, struct error *err)
{
    int slot = rank % OPEN_FILES;
    if (x->open[slot].fd < 0 || x->open[slot].rank != rank) {
        if (x->open[slot].fd >= 0)
            close(x->open[slot].fd);
        x->open[slot].rank = rank;
        x->open[slot].fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    *fd = x->open[slot].fd;
    return *fd < 0 ? error_errno(err, errno, "cannot open %s", path) : ERR_OK;
}

/* The elements that piece and target have in common. Whole rows of the piece lie in the file one behind the other, and
 * are read together. */
static int copy(struct shard_index *x, const struct piece *p, const struct area *target, size_t size, char *out,
                struct error *err)
{
    struct area from, to;
    char path[PATH_MAX];
    int fd;
    if (!meet(&p->area, target, &from) || !meet(target, &p->area, &to))
        return ERR_OK;
    int rc = shard_path(x, p->rank, path, err);
    if (!rc)
        rc = file_of(x, p->rank, path, &fd, err);
    if (rc)
        return rc;
    int64_t row = from.ncols * (int64_t)size, at_once = 1;
    bool rows = from.ncols == from.stride, direct = !rows || to.ncols == to.stride;
    if (rows)
        at_once = direct ? from.nrows : larger(SCATTER / row, 1);
    direct = direct || row > SCATTER;
    for (int64_t r = 0; r < from.nrows && !rc; r += at_once) {
        int64_t n = smaller(at_once, from.nrows - r);
        uint64_t offset = p->data + (uint64_t)(from.at + r * from.stride) * size;
        char *place = out + (to.at + r * to.stride) * (int64_t)size;
        rc = safetensors_read_at(fd, path, offset, (uint64_t)(n * row), direct ? place : x->scatter, err);
        for (int64_t k = 0; k < n && !direct && !rc; k++)
            memcpy(place + k * to.stride * (int64_t)size, (char *)x->scatter + k * row, (size_t)row);
    }
    return rc;
}

int shard_index_check(const struct shard_index *x, int64_t i, int kind, struct error *err)
{
    struct state_tensor t;
    struct area whole[AREAS];
    char name[SHARD_NAME_BYTES];
    size_t n;
    x->view.tensor(x->view.of, i, shard_kinds[kind], &t);
    shard_entry_name(name, t.tensor.name, kind);
    int wanted = areas_of(t.tensor.row0, t.tensor.col0, t.tensor.ncols, 0, t.tensor.nrows * t.tensor.ncols, whole);
    const struct piece *p = pieces_of(x, i, kind, &n);
    int rc = check_once(x, name, p, n, err);
    for (int a = 0; a < wanted && !rc; a++)
        if (held(&whole[a], p, n) != whole[a].nrows * whole[a].ncols)
            rc = incomplete(x, name, &whole[a], p, n, err);
    return rc;
}

int shard_index_read(struct shard_index *x, int64_t i, int kind, int64_t first, int64_t count, void *out,
                     struct error *err)
{
    struct state_tensor t;
    struct area targets[AREAS];
    char name[SHARD_NAME_BYTES];
    size_t n;
    x->view.tensor(x->view.of, i, shard_kinds[kind], &t);
    shard_entry_name(name, t.tensor.name, kind);
    int wanted = areas_of(t.tensor.row0, t.tensor.col0, t.tensor.ncols, first, count, targets);
    const struct piece *p = pieces_of(x, i, kind, &n);
    int rc = check_once(x, name, p, n, err);
    for (int a = 0; a < wanted && !rc; a++)
        if (held(&targets[a], p, n) != targets[a].nrows * targets[a].ncols)
            rc = incomplete(x, name, &targets[a], p, n, err);
    for (int a = 0; a < wanted; a++)
        for (size_t k = 0; k < n && !rc; k++)
            rc = copy(x, &p[k], &targets[a], dtype_size(t.dtype), out, err);
    if (rc)
        error_context(err, "tensor %s", name);
    return rc;
}
