/* Servers that drip, change files under one's hands, send elsewhere, want another region or clock, or leave uploads behind. */
#include "tests/unit/remote/server.h"

enum { FILE_BYTES = 200 << 10 };

static struct http *plain(const char *ca, int stall_ms, int tries)
{
    struct http *h = NULL;
    struct http_options o = {.stop = &stop, .stall_ms = stall_ms, .connect_ms = 2000, .ca_file = ca, .tries = tries};
    assert_int_equal(http_open(&o, &h, &err), ERR_OK);
    return h;
}

static void put_plain(const char *name)
{
    struct http *h = plain(NULL, 5000, 1);
    char url[200];
    snprintf(url, sizeof url, "%s/-/plain/%s", endpoint, name);
    struct http_call call = {.method = "PUT", .url = url, .fd = -1, .body = data, .body_len = FILE_BYTES};
    assert_int_equal(http_do(h, &call, &err), ERR_OK);
    assert_int_equal(call.status, 200);
    http_close(h);
}

/* As the cache of an agent does it. *got: how far it came. */
static int fetch(struct http *h, const char *url, int64_t *got)
{
    const struct fetch_source f = {.url = url, .http = h};
    struct fetch_info info;
    char path[320];
    snprintf(path, sizeof path, "%s.part", file);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    *got = 0;
    int rc = fetch_look(&f, &info, &err);
    if (!rc)
        rc = fetch_rest(&f, fd, got, info.bytes, INT64_MAX, info.etag, &err);
    close(fd);
    if (!rc) {
        struct buffer back;
        buffer_init(&back, FILE_BYTES);
        assert_int_equal(fs_read_file(path, &back, &err), ERR_OK);
        assert_int_equal(back.len, FILE_BYTES);
        assert_memory_equal(back.data, data, FILE_BYTES);
        buffer_free(&back);
    }
    unlink(path);
    return rc;
}

static int fetch_plain(const char *name, int stall_ms, int tries, int64_t *got)
{
    struct http *h = plain(NULL, stall_ms, tries);
    char url[200];
    snprintf(url, sizeof url, "%s/-/plain/%s", endpoint, name);
    int rc = fetch(h, url, got);
    http_close(h);
    return rc;
}

static void one_that_drips_is_given_up(void **state)
{
    int64_t got, since;
    (void)state;
    put_plain("drip");
    faults("[{\"method\":\"GET\",\"match\":\"drip\",\"drip\":40}]");
    since = clock_mono_ns();
    assert_int_equal(fetch_plain("drip", 600, 1, &got), ERR_TIMEOUT);
    assert_non_null(strstr(err.message, "less than 1024 bytes a second"));
    assert_true(got > 0 && got < 2000);
    assert_true(clock_mono_ns() - since < 5 * NS_PER_S);
    faults("[{\"method\":\"GET\",\"match\":\"drip\",\"drip\":40}]"); /* the next connection is better */
    assert_int_equal(fetch_plain("drip", 600, 3, &got), ERR_OK);
    faults("[{\"method\":\"GET\",\"match\":\"drip\",\"drip\":20000}]"); /* slow, but it comes on */
    assert_int_equal(fetch_plain("drip", 600, 1, &got), ERR_OK);
}

static void a_file_that_changes_is_not_mixed(void **state)
{
    int64_t got;
    (void)state;
    put_plain("changes");
    faults("[{\"method\":\"GET\",\"match\":\"changes\",\"cut\":70000},"
           " {\"method\":\"GET\",\"match\":\"changes\",\"etag\":\"\\\"another\\\"\"}]");
    assert_int_equal(fetch_plain("changes", 5000, 0, &got), ERR_BUSY);
    assert_non_null(strstr(err.message, "was changed"));
}

static void a_server_without_ranges_begins_anew(void **state)
{
    int64_t got;
    (void)state;
    put_plain("whole");
    faults("[{\"method\":\"GET\",\"match\":\"whole\",\"cut\":70000},"
           " {\"method\":\"GET\",\"match\":\"whole\",\"no_range\":true}]");
    assert_int_equal(fetch_plain("whole", 5000, 0, &got), ERR_OK);
    assert_int_equal(got, FILE_BYTES);
}

/* A connection that always breaks after little is no endless story. */
static void little_by_little_ends(void **state)
{
    int64_t got;
    (void)state;
    put_plain("little");
    faults("[{\"method\":\"GET\",\"match\":\"little\",\"cut\":100,\"times\":1000}]");
    int before = requests("GET /-/plain/little");
    assert_int_equal(fetch_plain("little", 5000, 4, &got), ERR_UNREACHABLE);
    assert_int_equal(requests("GET /-/plain/little"), before + 4);
    assert_int_equal(got, 400);
    faults("[]");
}

static void it_goes_where_it_is_sent(void **state)
{
    char text[400];
    int64_t got;
    (void)state;
    put_plain("moved");
    snprintf(text, sizeof text, "[{\"match\":\"old\",\"times\":2,\"status\":302,\"location\":\"%s/-/plain/moved\"}]", endpoint);
    faults(text);
    assert_int_equal(fetch_plain("old", 5000, 1, &got), ERR_OK);
    faults("[{\"match\":\"old\",\"times\":2,\"status\":302,\"location\":\"file:///etc/passwd\"}]");
    assert_int_equal(fetch_plain("old", 5000, 1, &got), ERR_INVALID);
    snprintf(text, sizeof text, "[{\"match\":\"old\",\"times\":100,\"status\":302,\"location\":\"%s/-/plain/old\"}]", endpoint);
    faults(text);
    assert_int_equal(fetch_plain("old", 5000, 1, &got), ERR_INVALID);
    faults("[]");
}

static void a_date_to_retry_after(void **state)
{
    int64_t got, since = clock_mono_ns();
    (void)state;
    put_plain("dated");
    faults("[{\"method\":\"GET\",\"match\":\"dated\",\"status\":503,\"retry_after_date\":3}]");
    assert_int_equal(fetch_plain("dated", 5000, 0, &got), ERR_OK);
    assert_true(clock_mono_ns() - since >= 3 * NS_PER_S / 2); /* whole seconds: 1 to 3 */
}

static void a_clock_that_is_off_is_said(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models", .key = "skewed"};
    struct s3_object o;
    (void)state;
    faults("[{\"match\":\"skewed\",\"status\":403,\"clock\":-7200}, {\"match\":\"skewed\",\"status\":403,\"clock\":7200},"
           " {\"match\":\"skewed\",\"status\":403}]");
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_REFUSED); /* whose answer has no text */
    assert_non_null(strstr(err.hint, "clock is 7"));
    assert_non_null(strstr(err.hint, "ahead of the store's"));
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "behind the store's"));
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "keys"));
    s3_close(s);
}

static void the_region_is_learnt(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models", .key = "far"};
    struct s3_object o;
    (void)state;
    ask("PUT", "/-/region", "eu-west-9", NULL);
    assert_int_equal(s3_put(s, &at, "abc", 3, NULL, &err), ERR_OK);
    int before = requests("HEAD /models/far");
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_OK);
    assert_int_equal(requests("HEAD /models/far"), before + 1); /* known by now */
    s3_close(s);
    s = client();
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_OK); /* by the header alone */
    ask("PUT", "/-/region", "eu-west-8", NULL);         /* no third one */
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_INVALID);
    assert_non_null(strstr(err.hint, "s3_region of agent.conf to eu-west-8"));
    ask("PUT", "/-/region", "", NULL);
    faults("[{\"match\":\"far\",\"status\":301}]");
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_INVALID);
    assert_non_null(strstr(err.hint, "s3_endpoint"));
    s3_close(s);
}

/* The server lists three of them on a page. */
static void many_unfinished_uploads_are_given_up(void **state)
{
    struct s3 *s = client();
    struct s3_url prefix = {.bucket = "models", .key = "left/"};
    int64_t sent;
    int count = 0;
    (void)state;
    faults("[{\"match\":\"partNumber=2\",\"status\":400,\"times\":8}]");
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < 8; i++) {
        struct s3_url at = {.bucket = "models"};
        snprintf(at.key, sizeof at.key, "left/%d", i);
        assert_int_equal(s3_upload(s, &at, fd, BYTES, sum, &sent, &err), ERR_INVALID);
    }
    close(fd);
    assert_int_equal(s3_abort_uploads(s, &prefix, "left/3", &count, &err), ERR_OK);
    assert_int_equal(count, 7);
    assert_int_equal(s3_abort_uploads(s, &prefix, NULL, &count, &err), ERR_OK);
    assert_int_equal(count, 1);
    s3_close(s);
}

static void tls(void **state)
{
    char dir[320], cert[340], other[340], url[200], text[300];
    pid_t pid = 0;
    int input = -1;
    int64_t got;
    (void)state;
    snprintf(dir, sizeof dir, "%s.tls", file);
    snprintf(cert, sizeof cert, "%s/own.crt", dir);
    snprintf(other, sizeof other, "%s/other.crt", dir);
    assert_int_equal(fs_make_dirs(dir, 0700, &err), ERR_OK);
    int port = start_server(dir, &pid, &input);
    assert_true(port > 0);
    snprintf(url, sizeof url, "https://127.0.0.1:%d/-/plain/a", port);
    struct http *h = plain(cert, 5000, 1);
    struct http_call put = {.method = "PUT", .url = url, .fd = -1, .body = data, .body_len = FILE_BYTES};
    if (http_do(h, &put, &err))
        fail_msg("%s", err.message);
    assert_int_equal(fetch(h, url, &got), ERR_OK);
    /* To where anybody could change it, it is not sent on. */
    put_plain("a");
    snprintf(text, sizeof text, "[{\"match\":\"plain\",\"status\":302,\"location\":\"%s/-/plain/a\"}]", endpoint);
    snprintf(url, sizeof url, "https://127.0.0.1:%d/-/faults", port);
    struct http_call fault = {.method = "PUT", .url = url, .fd = -1, .body = text, .body_len = strlen(text)};
    assert_int_equal(http_do(h, &fault, &err), ERR_OK);
    snprintf(url, sizeof url, "https://127.0.0.1:%d/-/plain/a", port);
    assert_int_equal(fetch(h, url, &got), ERR_INVALID);
    assert_non_null(strstr(err.message, "not https"));
    http_close(h);
    h = plain(other, 5000, 1);
    assert_int_equal(fetch(h, url, &got), ERR_INVALID);
    assert_non_null(strstr(err.hint, "s3_ca"));
    http_close(h);
    close(input);
    waitpid(pid, NULL, 0);
    assert_int_equal(fs_remove_tree(dir, &err), ERR_OK);
}

static void progress_counts_what_is_there(void **state)
{
    struct http_progress p = {.before = 0};
    struct s3 *s = NULL;
    struct s3_options o = {.http = {.stop = &stop, .stall_ms = 5000, .connect_ms = 2000, .progress = &p},
                           .endpoint = endpoint, .region = "us-east-1", .path_style = true, .part_bytes = PART};
    struct s3_url at = {.bucket = "models", .key = "counted"};
    int64_t sent;
    (void)state;
    snprintf(o.credentials.access_key, sizeof o.credentials.access_key, "AKIDTEST");
    snprintf(o.credentials.secret_key, sizeof o.credentials.secret_key, "secret/of+tests");
    assert_int_equal(s3_open(&o, &s, &err), ERR_OK);
    faults("[{\"match\":\"partNumber=4\",\"status\":400}]");
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    assert_int_equal(s3_upload(s, &at, fd, BYTES, sum, &sent, &err), ERR_INVALID);
    assert_true(atomic_load(&p.done) >= 3 * PART && atomic_load(&p.done) <= 4 * PART);
    http_progress_passed(&p, 1000); /* as if a file had been before it */
    faults("[{\"match\":\"partNumber=4\",\"status\":400}]");
    sent = 0;
    assert_int_equal(s3_upload(s, &at, fd, BYTES, sum, &sent, &err), ERR_INVALID);
    assert_int_equal(sent, 0); /* those parts were there, and count */
    assert_true(atomic_load(&p.done) >= 1000 + 3 * PART && atomic_load(&p.done) <= 1000 + 4 * PART);
    assert_int_equal(s3_upload(s, &at, fd, BYTES, sum, &sent, &err), ERR_OK);
    assert_int_equal(atomic_load(&p.done), 1000 + BYTES);
    close(fd);
    s3_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_that_drips_is_given_up),
        cmocka_unit_test(a_file_that_changes_is_not_mixed),
        cmocka_unit_test(a_server_without_ranges_begins_anew),
        cmocka_unit_test(little_by_little_ends),
        cmocka_unit_test(it_goes_where_it_is_sent),
        cmocka_unit_test(a_date_to_retry_after),
        cmocka_unit_test(a_clock_that_is_off_is_said),
        cmocka_unit_test(the_region_is_learnt),
        cmocka_unit_test(many_unfinished_uploads_are_given_up),
        cmocka_unit_test(tls),
        cmocka_unit_test(progress_counts_what_is_there),
    };
    return cmocka_run_group_tests(tests, start, end);
}
