/* agent_cache.h */
#include "daemon/agent_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/fs.h"
#include "proto/jobfile.h"

enum {
    CHUNK = 1 << 20,
    HASH_DIGITS = 24,
    NAME = sizeof((struct cache_item){0}.name),
    ORDERS_MAX = 256 << 20,
    YOUNG_S = 600, /* another job may be about to start with it */
    LOCK_MS = 200,
    DEPTH = 4,
    TEXT_MAX = 64 << 20,
};
static const char sum_mark[] = "#sha256=", part_end[] = ".part", gone_end[] = ".gone";

/* ---- names ---- */

const char *cache_path_at(const Boost__JobSpec *spec, size_t i)
{
    const Boost__Data *d = spec->data;
    size_t files = d ? d->n_train + d->n_eval : 0;
    const Boost__InitFrom *from = spec->checkpoint ? spec->checkpoint->init_from : NULL;
    const char *path = i > files || (i == files && !from) ? NULL
                       : i == files                       ? from->path
                       : i < d->n_train                   ? d->train[i]->path
                                                          : d->eval[i - d->n_train]->path;
    return i <= files && (i < files || from) && !path ? "" : path;
}

static int not_fetched(const char *path, struct error *err)
{
    error_set(err, ERR_INVALID, "%.300s is no URL that can be fetched", path);
    return error_hint(err, "write http://, https:// or s3://, and #sha256= with 64 lower-case hex digits at its end "
                           "where its checksum is to be held");
}

/* "https://user:word@host": the word would be shown with the job, and stand in logs. */
static bool has_password(const char *url)
{
    const char *host = strstr(url, "://") + 3;
    const char *at = memchr(host, '@', strcspn(host, "/?#"));
    return strncmp(url, "s3://", 5) != 0 && at != NULL;
}

const char *cache_shown(const char *path)
{
    return jobfile_is_url(path) && has_password(path) ? "(a URL with a password)" : path;
}

int cache_item_parse(const char *path, struct cache_item *out, struct error *err)
{
    char hash[SIGV4_HASH];
    const char *mark = strchr(path, '#');
    size_t len = mark ? (size_t)(mark - path) : strlen(path);
    *out = (struct cache_item){0};
    bool sum = mark && !strncmp(mark, sum_mark, sizeof sum_mark - 1) &&
               strspn(mark + sizeof sum_mark - 1, "0123456789abcdef") == SIGV4_HASH - 1 &&
               strlen(mark) == sizeof sum_mark - 1 + SIGV4_HASH - 1;
    if (!jobfile_is_fetched(path) || (mark && !sum))
        return not_fetched(path, err);
    if (has_password(path)) {
        error_set(err, ERR_INVALID, "a URL with a user's name or password is not taken: all who see the job would see it");
        return error_hint(err, "serve the file without, or from an object store (s3://), whose keys no job holds");
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

/* ---- beginning and end ---- */

static bool needs_keys(const Boost__JobSpec *spec)
{
    for (size_t i = 0; cache_path_at(spec, i); i++)
        if (!strncmp(cache_path_at(spec, i), "s3://", 5))
            return true;
    return false;
}

int cache_begin(struct cache *c, const struct agent_remote *by, const char *attempts_dir, const Boost__JobSpec *spec,
                int tries, struct error *err)
{
    const char *dir = spec->data && spec->data->cache_dir ? spec->data->cache_dir : "";
    *c = (struct cache){.by = by, .attempts_dir = attempts_dir, .spec = spec, .lock = -1};
    struct http_options o = agent_http_options(by, tries);
    int rc = ERR_OK;
    if (*dir != '/' || snprintf(c->dir, sizeof c->dir, "%s", dir) >= (int)sizeof c->dir) {
        error_set(err, ERR_INVALID, "data.cache_dir is not set, and the job has files by URL");
        rc = error_hint(err, "set data.cache_dir to a directory of each node that the job's user can make and write");
    }
    if (!rc)
        c->max = spec->data->cache_max_mib << 20;
    if (!rc)
        rc = http_open(&o, &c->http, err);
    if (!rc && needs_keys(spec))
        rc = agent_s3_open(by, tries, &c->s3, err);
    if (rc == ERR_NOT_FOUND) /* the keys, no file of the job */
        rc = err->code = ERR_REFUSED;
    return rc;
}

int cache_user_identity(struct cache *c, struct error *err)
{
    int rc = c->as_user ? ERR_OK : as_user_begin(&c->user, c->by->uid, c->by->gid, err);
    c->as_user = rc == ERR_OK;
    return rc;
}

void cache_own_identity(struct cache *c)
{
    if (c->as_user)
        as_user_end(&c->user);
    c->as_user = false;
}

int cache_enter(struct cache *c, struct error *err)
{
    int rc = cache_user_identity(c, err);
    if (!rc && (rc = fs_make_dirs(c->dir, 0777, err)))
        error_context(err, "data.cache_dir");
    return rc;
}

int cache_lock(struct cache *c, struct error *err)
{
    char path[PATH_MAX];
    if (c->lock >= 0)
        return ERR_OK;
    int rc = fs_join(path, sizeof path, err, c->dir, ".lock");
    if (!rc && (c->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0)
        rc = error_errno(err, errno, "cannot open %s", path);
    while (!rc && flock(c->lock, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            rc = error_errno(err, errno, "cannot lock %s", path);
        else if (!http_pause(c->http, LOCK_MS))
            rc = error_set(err, ERR_CANCELLED, "the agent is ending");
    }
    return rc;
}

void cache_end(struct cache *c)
{
    if (c->lock >= 0)
        close(c->lock);
    cache_own_identity(c);
    http_close(c->http);
    s3_close(c->s3);
}

static struct fetch_source source_of(const struct cache *c, const char *url)
{
    return (struct fetch_source){url, c->http, !strncmp(url, "s3://", 5) ? c->s3 : NULL};
}

int cache_look(const struct cache *c, const char *url, struct fetch_info *out, struct error *err)
{
    const struct fetch_source f = source_of(c, url);
    return fetch_look(&f, out, err);
}

int cache_text(const struct cache *c, const char *url, struct buffer *out, struct error *err)
{
    const struct fetch_source f = source_of(c, url);
    buffer_init(out, TEXT_MAX);
    int rc = fetch_text(&f, out, err);
    if (!rc && buffer_append(out, "", 1))
        rc = error_set(err, ERR_NOMEM, "no memory for %.300s", url);
    return rc;
}

/* ---- what has to stay ---- */

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

/* As they are now: whoever fetched before this one may have begun meanwhile. */
static int orders_now(struct cache *c, struct buffer *out, struct error *err)
{
    buffer_clear(out);
    cache_own_identity(c);
    int rc = read_orders(c->attempts_dir, out, err);
    int back = cache_user_identity(c, rc ? NULL : err);
    return rc ? rc : back;
}

static bool in_use(const struct cache *c, const struct buffer *orders, const char *name)
{
    size_t len = strlen(name);
    if (orders->len && memmem(orders->data, orders->len, name, len))
        return true;
    for (size_t i = 0; cache_path_at(c->spec, i); i++) {
        struct cache_item item = {0};
        const char *path = cache_path_at(c->spec, i);
        bool same = jobfile_is_url(path) && !cache_item_parse(path, &item, NULL) &&
                    !strncmp(name, item.name, strlen(item.name));
        free(item.url);
        if (same)
            return true;
    }
    return false;
}

/* ---- room ---- */

static bool is_ours(const char *name)
{
    return strspn(name, "0123456789abcdef") == HASH_DIGITS && name[HASH_DIGITS] == '-';
}

static bool is_young(const struct stat *st)
{
    return st->st_mtim.tv_sec + YOUNG_S > time(NULL);
}

/* Of a file, or of all the files in a directory. */
static int64_t bytes_of(int at, const char *name, const struct stat *st, int depth)
{
    if (S_ISREG(st->st_mode))
        return st->st_size;
    int fd = S_ISDIR(st->st_mode) && depth > 0 ? openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    int64_t sum = 0;
    if (fd >= 0 && !d)
        close(fd);
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat in;
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            fstatat(dirfd(d), e->d_name, &in, AT_SYMLINK_NOFOLLOW) == 0)
            sum += bytes_of(dirfd(d), e->d_name, &in, depth - 1);
    }
    if (d)
        closedir(d);
    return sum;
}

/* Under another name first: a directory that is half gone would be taken for a whole one, and who needs what is there
 * only touches it, without the lock. */
static bool remove_entry(const struct cache *c, const char *name)
{
    char path[PATH_MAX], gone[PATH_MAX];
    struct stat st;
    size_t len = strlen(name), end = sizeof gone_end - 1;
    if (fs_join(path, sizeof path, NULL, c->dir, name))
        return false;
    if (len > end && !strcmp(name + len - end, gone_end))
        return !fs_remove_tree(path, NULL);
    if (snprintf(gone, sizeof gone, "%s%s", path, gone_end) >= (int)sizeof gone || fs_remove_tree(gone, NULL) ||
        rename(path, gone) < 0)
        return false;
    if (lstat(gone, &st) == 0 && is_young(&st)) /* touched just now */
        return rename(gone, path) == 0;
    return !fs_remove_tree(gone, NULL);
}

/* The entry that was used longest ago and may go: "" = there is none. Returns the bytes of all that are there. */
static int64_t oldest(const struct cache *c, const struct buffer *orders, char out[NAME + 16])
{
    DIR *d = opendir(c->dir);
    struct timespec least = {0};
    int64_t held = 0;
    out[0] = '\0';
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        if (!is_ours(e->d_name) || strlen(e->d_name) >= NAME + 16 ||
            fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
            continue;
        held += bytes_of(dirfd(d), e->d_name, &st, DEPTH);
        bool older = !*out || st.st_mtim.tv_sec < least.tv_sec ||
                     (st.st_mtim.tv_sec == least.tv_sec && st.st_mtim.tv_nsec < least.tv_nsec);
        if (!older || is_young(&st) || in_use(c, orders, e->d_name))
            continue;
        least = st.st_mtim;
        snprintf(out, NAME + 16, "%s", e->d_name);
    }
    if (d)
        closedir(d);
    return held;
}

int cache_too_large(const struct cache *c, const char *url, int64_t bytes, struct error *err)
{
    error_set(err, ERR_INVALID, "%.300s has %" PRId64 " MiB, more than data.cache_max_mib = %" PRId64, url,
              (bytes + (1 << 20) - 1) >> 20, c->max >> 20);
    return error_hint(err, "raise data.cache_max_mib, or set it to 0 for no limit");
}

/* So that `bytes`, `have` of which are there, are within the bound; -1: not known. */
static int make_room(struct cache *c, const char *url, int64_t bytes, int64_t have, struct error *err)
{
    char name[NAME + 16];
    struct buffer orders;
    if (!c->max || bytes < 0)
        return ERR_OK;
    if (bytes > c->max)
        return cache_too_large(c, url, bytes, err);
    buffer_init(&orders, ORDERS_MAX);
    int64_t held = oldest(c, &orders, name);
    int rc = held - have + bytes > c->max ? orders_now(c, &orders, err) : ERR_OK;
    while (!rc && (held = oldest(c, &orders, name)) - have + bytes > c->max && *name && remove_entry(c, name))
        ;
    buffer_free(&orders);
    if (rc || held - have + bytes <= c->max)
        return rc;
    error_set(err, ERR_NOSPACE, "no room for its %.1f MiB: of the cache's %" PRId64
              " MiB %.1f are in use, or were used within the last %d s (%s)", (double)bytes / (1 << 20), c->max >> 20,
              (double)(held - have) / (1 << 20), YOUNG_S, c->dir);
    return error_hint(err, "raise data.cache_max_mib, or wait for other jobs to end");
}

/* ---- one file ---- */

static int check_sum(int fd, const struct cache_file *f, struct error *err)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    char hex[SIGV4_HASH];
    EVP_MD_CTX *md = f->sum && *f->sum ? EVP_MD_CTX_new() : NULL;
    uint8_t *chunk = md ? malloc(CHUNK) : NULL;
    off_t at = 0;
    ssize_t n = 0;
    int rc = ERR_OK;
    if (!f->sum || !*f->sum)
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
        if (strcmp(hex, f->sum) != 0) {
            error_set(err, ERR_CORRUPT, "%.300s is another file: its SHA-256 is %s, not %s", f->url, hex, f->sum);
            rc = error_hint(err, "correct the checksum in the job file, or the file");
        }
    }
    EVP_MD_CTX_free(md);
    free(chunk);
    return rc;
}

static bool same_etag(const char *etag_path, const struct fetch_info *info)
{
    struct buffer was;
    buffer_init(&was, sizeof info->etag);
    bool same = *info->etag && !fs_read_regular(etag_path, &was, NULL) && was.len == strlen(info->etag) &&
                !memcmp(was.data, info->etag, was.len);
    buffer_free(&was);
    return same;
}

int cache_of_disk(int rc, struct error *err)
{
    if (rc == ERR_NOT_FOUND)
        err->code = rc = ERR_IO;
    return rc;
}

/* How much of an earlier try can be gone on with. */
static int64_t begun(const char *etag_path, const struct fetch_info *info, int fd)
{
    struct stat st;
    if (!same_etag(etag_path, info) || fstat(fd, &st) < 0 || info->bytes < 0 || st.st_size > info->bytes)
        return 0;
    return st.st_size;
}

static int fetch_part(struct cache *c, const struct cache_file *f, const char *part, const char *etag, int64_t *moved,
                      struct error *err)
{
    const struct fetch_source from = source_of(c, f->url);
    int fd = open(part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600); /* keys may have been needed */
    if (fd < 0)
        return cache_of_disk(error_errno(err, errno, "cannot write %s", part), err);
    int64_t before = begun(etag, &f->info, fd), have = before;
    int rc = ftruncate(fd, have) < 0 ? error_errno(err, errno, "cannot write %s", part) : ERR_OK;
    if (!rc)
        rc = make_room(c, f->url, f->info.bytes, have, err);
    if (!rc)
        rc = cache_of_disk(fs_write_atomic(etag, f->info.etag, strlen(f->info.etag), 0600, err), err);
    int64_t known = f->info.bytes, most = known < 0 && c->max ? c->max : INT64_MAX;
    if (!rc)
        rc = fetch_rest(&from, fd, &have, known, most, f->info.etag, err);
    *moved += have > before ? have - before : 0;
    if (!rc && known < 0) /* only now it is told how large it is */
        rc = make_room(c, f->url, have, have, err);
    if (!rc) {
        rc = check_sum(fd, f, err);
        if (rc == ERR_CORRUPT && (unlink(part) < 0 || unlink(etag) < 0))
            error_context(err, "and %s cannot be removed", part);
    }
    if (!rc && fsync(fd) < 0)
        rc = error_errno(err, errno, "cannot write %s", part);
    close(fd);
    return rc;
}

static int fetch_file(struct cache *c, struct cache_file *f, int64_t *moved, struct error *err)
{
    char part[PATH_MAX], etag[PATH_MAX], kept[PATH_MAX], parent[PATH_MAX];
    if (snprintf(part, sizeof part, "%s%s", f->path, part_end) >= (int)sizeof part ||
        snprintf(etag, sizeof etag, "%s.etag", part) >= (int)sizeof etag ||
        snprintf(kept, sizeof kept, "%s.etag", f->path) >= (int)sizeof kept)
        return error_set(err, ERR_INVALID, "path too long: %s", f->path);
    fs_parent(parent, f->path);
    int rc = fetch_part(c, f, part, etag, moved, err);
    if (!rc && f->keep_etag)
        rc = cache_of_disk(fs_write_atomic(kept, f->info.etag, strlen(f->info.etag), 0600, err), err);
    if (!rc && rename(part, f->path) < 0)
        rc = cache_of_disk(error_errno(err, errno, "cannot rename %s", part), err);
    if (!rc) {
        unlink(etag);
        rc = cache_of_disk(fs_sync_dir(parent, err), err);
    }
    return rc;
}

static bool can_read(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

/* A directory that others may write too could hold something of theirs under this name. What root has put there the
 * user cannot touch, and perhaps not read. */
bool cache_has(const struct cache *c, const char *path, bool directory)
{
    struct stat st;
    bool there = lstat(path, &st) == 0 && (directory ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode)) &&
                 (st.st_uid == c->by->uid || st.st_uid == 0);
    if (there && utimensat(AT_FDCWD, path, NULL, AT_SYMLINK_NOFOLLOW) < 0 && st.st_uid == c->by->uid)
        return false;
    return there && can_read(path);
}

/* Those that carry their ETag are looked at whether they are there or not. */
static bool is_there(const struct cache *c, const struct cache_file *f)
{
    char kept[PATH_MAX];
    struct stat st;
    if (!cache_has(c, f->path, false))
        return false;
    return !f->keep_etag ||
           (snprintf(kept, sizeof kept, "%s.etag", f->path) < (int)sizeof kept && same_etag(kept, &f->info) &&
            lstat(f->path, &st) == 0 && st.st_size == f->info.bytes);
}

int cache_fetch(struct cache *c, struct cache_file *files, size_t n, int64_t *moved, size_t *at, struct error *err)
{
    int64_t total = 0;
    size_t there = 0;
    while (there < n && !files[there].keep_etag && is_there(c, &files[there]))
        there++;
    *at = there < n ? there : 0;
    int locked = there < n ? cache_lock(c, err) : ERR_OK;
    if (locked || there == n)
        return locked;
    for (*at = 0; *at < n; ++*at) {
        struct cache_file *f = &files[*at];
        if (!f->keep_etag && is_there(c, f))
            continue;
        int rc = cache_look(c, f->url, &f->info, err);
        if (rc)
            return rc;
        total += f->info.bytes > 0 && !is_there(c, f) ? f->info.bytes : 0;
    }
    http_progress_total(c->by->progress, total);
    for (*at = 0; *at < n; ++*at) {
        struct cache_file *f = &files[*at];
        if (is_there(c, f))
            continue;
        int rc = fetch_file(c, f, moved, err);
        if (rc)
            return rc;
        http_progress_passed(c->by->progress, f->info.bytes > 0 ? f->info.bytes : 0);
    }
    return ERR_OK;
}
