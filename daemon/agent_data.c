/* agent_data.h
 *
 *   cache_dir/<24 hex digits of the URL's SHA-256>-<name>      whole, checked
 *   cache_dir/<the same>.part, .etag                           on its way, and what it is a part of
 *   cache_dir/.lock                                            held while one fetches or removes */
#include "daemon/agent_data.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/agent_user.h"
#include "daemon/remote/fetch.h"
#include "daemon/remote/sigv4.h"
#include "proto/base/fs.h"
#include "proto/reflect.h"

enum { CHUNK = 1 << 20, HASH_DIGITS = 24, NAME = 160, ORDERS_MAX = 256 << 20, YOUNG_S = 600, LOCK_MS = 200 };
static const char sum_mark[] = "#sha256=";

static bool is_url(const char *path)
{
    return path && strstr(path, "://");
}

/* The i-th file of the job, training files first; NULL: no more. */
static Boost__TokenFile *file_at(const Boost__JobSpec *spec, size_t i)
{
    const Boost__Data *d = spec->data;
    if (!d || i >= d->n_train + d->n_eval)
        return NULL;
    return i < d->n_train ? d->train[i] : d->eval[i - d->n_train];
}

bool data_has_urls(const Boost__JobSpec *spec)
{
    for (size_t i = 0; spec && file_at(spec, i); i++)
        if (is_url(file_at(spec, i)->path))
            return true;
    return false;
}

/* ---- one URL ---- */

struct item {
    char *url;     /* without its fragment */
    char sum[SIGV4_HASH]; /* that it has to have; "" = not told */
    char name[NAME];
};

static int parse_item(const char *path, struct item *out, struct error *err)
{
    char hash[SIGV4_HASH];
    const char *mark = strchr(path, '#');
    size_t len = mark ? (size_t)(mark - path) : strlen(path);
    out->sum[0] = '\0';
    bool known = !strncmp(path, "http://", 7) || !strncmp(path, "https://", 8) || !strncmp(path, "s3://", 5);
    bool sum = mark && !strncmp(mark, sum_mark, sizeof sum_mark - 1) &&
               strspn(mark + sizeof sum_mark - 1, "0123456789abcdef") == SIGV4_HASH - 1 &&
               strlen(mark) == sizeof sum_mark - 1 + SIGV4_HASH - 1;
    if (!known || (mark && !sum)) {
        error_set(err, ERR_INVALID, "%.300s is no URL that can be fetched", path);
        return error_hint(err, "write http://, https:// or s3://, and #sha256= with 64 lower-case hex digits at its end "
                               "where its checksum is to be held");
    }
    if (mark)
        snprintf(out->sum, sizeof out->sum, "%s", mark + sizeof sum_mark - 1);
    out->url = strndup(path, len);
    if (!out->url)
        return error_set(err, ERR_NOMEM, "no memory for a URL");
    sigv4_hash(path, strlen(path), hash);
    size_t end = strcspn(out->url, "?"), start = end;
    while (start > 0 && out->url[start - 1] != '/' && end - start < 80)
        start--;
    snprintf(out->name, sizeof out->name, "%.*s-%.*s", HASH_DIGITS, hash, (int)(end - start), out->url + start);
    for (char *p = out->name; *p; p++) /* of the user's own text only what no file system minds */
        if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-", *p))
            *p = '_';
    return ERR_OK;
}

int data_local(const Boost__JobSpec *spec, Boost__JobSpec **out, struct error *err)
{
    Boost__JobSpec *copy = (Boost__JobSpec *)reflect_clone(&spec->base);
    int rc = copy ? ERR_OK : error_set(err, ERR_NOMEM, "no memory for a job");
    for (size_t i = 0; !rc && file_at(copy, i); i++) {
        Boost__TokenFile *f = file_at(copy, i);
        struct item item = {0};
        char *path = NULL;
        if (!is_url(f->path))
            continue;
        rc = parse_item(f->path, &item, err);
        if (!rc && asprintf(&path, "%s/%s", copy->data->cache_dir, item.name) < 0)
            rc = error_set(err, ERR_NOMEM, "no memory for a path");
        if (!rc) {
            free(f->path);
            f->path = path;
        }
        free(item.url);
    }
    if (rc && copy)
        protobuf_c_message_free_unpacked(&copy->base, NULL);
    *out = rc ? NULL : copy;
    return rc;
}

/* ---- a fetch ---- */

struct work {
    const struct data_fetch *x;
    const Boost__JobSpec *spec;
    struct http *http;
    struct s3 *s3;
    struct buffer orders; /* start.pb of all attempts, one behind the other */
    int64_t max;          /* bytes of the cache; 0 = no limit */
    char dir[PATH_MAX];
};

/* What an order names is in use: names are as good as unique, so that looking for their text does. */
static int read_orders(const char *attempts_dir, struct buffer *out, struct error *err)
{
    DIR *d = opendir(attempts_dir);
    int rc = d ? ERR_OK : error_errno(err, errno, "cannot read %s", attempts_dir);
    for (struct dirent *e; !rc && (e = readdir(d));) {
        char path[PATH_MAX];
        if (e->d_name[0] == '.' ||
            snprintf(path, sizeof path, "%s/%s/start.pb", attempts_dir, e->d_name) >= (int)sizeof path)
            continue;
        int read = fs_read_regular(path, out, err); /* one that is being made, or goes, is not there */
        rc = read == ERR_NOMEM ? ERR_NOMEM : ERR_OK;
    }
    if (d)
        closedir(d);
    return rc;
}

static bool in_use(const struct work *w, const char *name)
{
    size_t len = strlen(name);
    if (w->orders.len && memmem(w->orders.data, w->orders.len, name, len))
        return true;
    for (size_t i = 0; file_at(w->spec, i); i++) {
        struct item item = {0};
        bool same = is_url(file_at(w->spec, i)->path) && !parse_item(file_at(w->spec, i)->path, &item, NULL) &&
                    !strncmp(name, item.name, strlen(item.name));
        free(item.url);
        if (same)
            return true;
    }
    return false;
}

static bool is_ours(const char *name)
{
    return strspn(name, "0123456789abcdef") == HASH_DIGITS && name[HASH_DIGITS] == '-';
}

/* Removes the file that was used longest ago and may go; false: there is none. *held: bytes of all that are there. */
static bool remove_oldest(const struct work *w, int64_t *held, bool remove, struct error *err)
{
    DIR *d = opendir(w->dir);
    char oldest[NAME + 16] = "", path[PATH_MAX];
    struct timespec least = {0};
    *held = 0;
    if (!d)
        error_errno(err, errno, "cannot read %s", w->dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        if (!is_ours(e->d_name) || strlen(e->d_name) >= sizeof oldest ||
            fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
            continue;
        *held += st.st_size;
        bool older = !*oldest || st.st_mtim.tv_sec < least.tv_sec ||
                     (st.st_mtim.tv_sec == least.tv_sec && st.st_mtim.tv_nsec < least.tv_nsec);
        /* Another job may be about to start with a young one. */
        if (!older || st.st_mtim.tv_sec + YOUNG_S > time(NULL) || in_use(w, e->d_name))
            continue;
        least = st.st_mtim;
        snprintf(oldest, sizeof oldest, "%s", e->d_name);
    }
    if (d)
        closedir(d);
    return remove && *oldest && !fs_join(path, sizeof path, err, w->dir, oldest) && unlink(path) == 0;
}

static int too_large(const struct work *w, const char *url, int64_t bytes, struct error *err)
{
    error_set(err, ERR_INVALID, "%.300s has %" PRId64 " MiB, more than data.cache_max_mib = %" PRId64, url,
              (bytes + (1 << 20) - 1) >> 20, w->max >> 20);
    return error_hint(err, "raise data.cache_max_mib, or set it to 0 for no limit");
}

static int make_room(const struct work *w, const struct item *item, int64_t bytes, int64_t have, struct error *err)
{
    int64_t held = 0;
    if (!w->max || bytes < 0)
        return ERR_OK;
    if (bytes > w->max)
        return too_large(w, item->url, bytes, err);
    do
        (void)remove_oldest(w, &held, false, err);
    while (held - have + bytes > w->max && remove_oldest(w, &held, true, err));
    if (held - have + bytes <= w->max)
        return ERR_OK;
    error_set(err, ERR_NOSPACE, "no room for its %.1f MiB: of the cache's %" PRId64
              " MiB %.1f are in use, or were used within the last %d s (%s)", (double)bytes / (1 << 20), w->max >> 20,
              (double)(held - have) / (1 << 20), YOUNG_S, w->dir);
    return error_hint(err, "raise data.cache_max_mib, or wait for other jobs to end");
}

static int check_sum(int fd, const struct item *item, struct error *err)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    char hex[SIGV4_HASH];
    EVP_MD_CTX *md = *item->sum ? EVP_MD_CTX_new() : NULL;
    uint8_t *chunk = md ? malloc(CHUNK) : NULL;
    off_t at = 0;
    ssize_t n = 0;
    int rc = ERR_OK;
    if (!*item->sum)
        return ERR_OK;
    if (!chunk || !EVP_DigestInit_ex(md, EVP_sha256(), NULL))
        rc = error_set(err, ERR_NOMEM, "no memory for a checksum");
    while (!rc && (n = pread(fd, chunk, CHUNK, at)) != 0) {
        if (n < 0 && errno != EINTR)
            rc = error_errno(err, errno, "what was fetched cannot be read");
        else if (n > 0) {
            EVP_DigestUpdate(md, chunk, (size_t)n);
            at += n;
        }
    }
    if (!rc) {
        EVP_DigestFinal_ex(md, sum, NULL);
        for (int i = 0; i < 32; i++)
            snprintf(hex + 2 * i, 3, "%02x", sum[i]);
        if (strcmp(hex, item->sum) != 0) {
            error_set(err, ERR_CORRUPT, "%.300s is another file: its SHA-256 is %s, not %s", item->url, hex, item->sum);
            rc = error_hint(err, "correct the checksum in the job file, or the file");
        }
    }
    EVP_MD_CTX_free(md);
    free(chunk);
    return rc;
}

/* How much of an earlier try can be gone on with. */
static int64_t begun(const char *etag_path, const struct fetch_info *info, int fd)
{
    struct buffer was;
    struct stat st;
    buffer_init(&was, sizeof info->etag);
    bool same = *info->etag && !fs_read_regular(etag_path, &was, NULL) && was.len &&
                !strcmp((char *)was.data, info->etag);
    buffer_free(&was);
    if (!same || fstat(fd, &st) < 0 || info->bytes < 0 || st.st_size > info->bytes)
        return 0;
    return st.st_size;
}

static int fetch_into(const struct work *w, const struct item *item, const char *path, int64_t *moved,
                      struct error *err)
{
    const struct fetch_source f = {item->url, w->http, !strncmp(item->url, "s3://", 5) ? w->s3 : NULL};
    struct fetch_info info;
    char part[PATH_MAX], etag[PATH_MAX];
    int64_t have = 0, before;
    int rc = fetch_look(&f, &info, err);
    if (rc)
        return rc;
    if (snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part ||
        snprintf(etag, sizeof etag, "%s.etag", path) >= (int)sizeof etag)
        return error_set(err, ERR_INVALID, "path too long: %s", path);
    int fd = open(part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    if (fd < 0)
        return error_errno(err, errno, "cannot write %s", part);
    before = have = begun(etag, &info, fd);
    if (ftruncate(fd, have) < 0)
        rc = error_errno(err, errno, "cannot write %s", part);
    if (!rc)
        rc = make_room(w, item, info.bytes, have, err);
    if (!rc)
        rc = fs_write_atomic(etag, info.etag, strlen(info.etag), 0644, err);
    int64_t most = info.bytes;
    if (!rc)
        rc = fetch_rest(&f, fd, &have, most, err);
    *moved += have > before ? have - before : 0;
    if (!rc && w->max && have > w->max)
        rc = too_large(w, item->url, have, err);
    if (!rc) {
        rc = check_sum(fd, item, err);
        if (rc == ERR_CORRUPT && (unlink(part) < 0 || unlink(etag) < 0))
            error_context(err, "and %s cannot be removed", part);
    }
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "cannot write %s", part);
    close(fd);
    if (!rc && rename(part, path) < 0)
        rc = error_errno(err, errno, "cannot rename %s", part);
    if (!rc) {
        unlink(etag);
        rc = fs_sync_dir(w->dir, err);
    }
    return rc;
}

static int fetch_item(const struct work *w, const struct item *item, int64_t *moved, struct error *err)
{
    char path[PATH_MAX];
    struct stat st;
    int rc = fs_join(path, sizeof path, err, w->dir, item->name);
    if (rc)
        return rc;
    /* A directory that others may write too could hold something of theirs under this name. */
    if (lstat(path, &st) == 0 && S_ISREG(st.st_mode) && (st.st_uid == w->x->by.uid || st.st_uid == 0))
        return utimensat(AT_FDCWD, path, NULL, AT_SYMLINK_NOFOLLOW) < 0 && errno != EPERM
                   ? error_errno(err, errno, "%s", path)
                   : ERR_OK;
    return fetch_into(w, item, path, moved, err);
}

/* ---- all of a job ---- */

static int lock_cache(const struct work *w, int *fd, struct error *err)
{
    char path[PATH_MAX];
    int rc = fs_join(path, sizeof path, err, w->dir, ".lock");
    *fd = rc ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (!rc && *fd < 0)
        return error_errno(err, errno, "cannot open %s", path);
    while (!rc && flock(*fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            rc = error_errno(err, errno, "cannot lock %s", path);
        else if (!http_pause(w->http, LOCK_MS))
            rc = error_set(err, ERR_CANCELLED, "the agent is ending");
    }
    return rc;
}

static bool needs_keys(const Boost__JobSpec *spec)
{
    for (size_t i = 0; file_at(spec, i); i++)
        if (file_at(spec, i)->path && !strncmp(file_at(spec, i)->path, "s3://", 5))
            return true;
    return false;
}

static int begin(struct work *w, const struct data_fetch *x, const Boost__JobSpec *spec, int tries, struct error *err)
{
    const char *dir = spec->data && spec->data->cache_dir ? spec->data->cache_dir : "";
    *w = (struct work){.x = x, .spec = spec, .max = spec->data->cache_max_mib << 20};
    buffer_init(&w->orders, ORDERS_MAX);
    struct http_options o = agent_http_options(&x->by, tries);
    int rc = ERR_OK;
    if (*dir != '/' || snprintf(w->dir, sizeof w->dir, "%s", dir) >= (int)sizeof w->dir) {
        error_set(err, ERR_INVALID, "data.cache_dir is not set, and a token file is a URL");
        rc = error_hint(err, "set data.cache_dir to a directory of each node that the job's user can make and write");
    }
    if (!rc)
        rc = http_open(&o, &w->http, err);
    if (!rc && needs_keys(spec))
        rc = agent_s3_open(&x->by, tries, &w->s3, err);
    if (rc == ERR_NOT_FOUND) /* the keys, no file of the job */
        rc = err->code = ERR_REFUSED;
    return rc;
}

static void end(struct work *w)
{
    http_close(w->http);
    s3_close(w->s3);
    buffer_free(&w->orders);
}

static bool seen_before(const Boost__JobSpec *spec, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (file_at(spec, k)->path && !strcmp(file_at(spec, k)->path, file_at(spec, i)->path))
            return true;
    return false;
}

typedef int (*item_fn)(struct work *w, const struct item *item, void *arg, struct error *err);

static int each_item(struct work *w, item_fn fn, void *arg, struct error *err)
{
    int rc = ERR_OK;
    for (size_t i = 0; !rc && file_at(w->spec, i); i++) {
        const char *path = file_at(w->spec, i)->path;
        struct item item = {0};
        if (!is_url(path) || seen_before(w->spec, i))
            continue;
        bool train = i < w->spec->data->n_train;
        rc = parse_item(path, &item, err);
        if (!rc)
            rc = fn(w, &item, arg, err);
        if (rc)
            error_context(err, "data.%s[%zu] %.300s", train ? "train" : "eval",
                          train ? i : i - w->spec->data->n_train, path);
        free(item.url);
    }
    return rc;
}

static int look_at(struct work *w, const struct item *item, void *arg, struct error *err)
{
    const struct fetch_source f = {item->url, w->http, !strncmp(item->url, "s3://", 5) ? w->s3 : NULL};
    struct fetch_info info;
    int64_t *sum = arg;
    int rc = fetch_look(&f, &info, err);
    if (!rc && info.bytes > 0)
        *sum += info.bytes;
    if (!rc && w->max && *sum > w->max) {
        error_set(err, ERR_INVALID, "with the files before it these are %" PRId64 " MiB, more than "
                  "data.cache_max_mib = %" PRId64, (*sum + (1 << 20) - 1) >> 20, w->max >> 20);
        rc = error_hint(err, "raise data.cache_max_mib, or set it to 0 for no limit");
    }
    return rc;
}

int data_look(const struct data_fetch *x, const Boost__JobSpec *spec, struct error *err)
{
    struct work w;
    int64_t sum = 0;
    int rc = begin(&w, x, spec, 1, err);
    if (!rc)
        rc = each_item(&w, look_at, &sum, err);
    end(&w);
    return rc;
}

static int fetch_each(struct work *w, const struct item *item, void *arg, struct error *err)
{
    return fetch_item(w, item, arg, err);
}

int data_fetch(const struct data_fetch *x, const Boost__JobSpec *spec, int64_t *moved, struct error *err)
{
    struct work w;
    struct as_user user;
    int lock = -1;
    *moved = 0;
    int rc = begin(&w, x, spec, 0, err);
    if (!rc && w.max)
        rc = read_orders(x->attempts_dir, &w.orders, err);
    if (!rc)
        rc = as_user_begin(&user, x->by.uid, x->by.gid, err);
    if (!rc) {
        rc = fs_make_dirs(w.dir, 0777, err);
        if (rc)
            error_context(err, "data.cache_dir");
        if (!rc)
            rc = lock_cache(&w, &lock, err);
        if (!rc)
            rc = each_item(&w, fetch_each, moved, err);
        if (lock >= 0)
            close(lock);
        as_user_end(&user);
    }
    end(&w);
    return rc;
}
