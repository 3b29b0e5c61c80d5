/* The S3 client against tests/e2e/s3server.py, which checks signatures: uploads in parts, those that were cut, failures
 * that pass and failures that do not. */
#include "tests/unit/remote/server.h"

static int upload(struct s3 *s, const char *key, int64_t *sent)
{
    struct s3_url at;
    char url[300];
    snprintf(url, sizeof url, "s3://models/%s", key);
    assert_int_equal(s3_url_parse(url, &at, &err), ERR_OK);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    *sent = 0;
    int rc = s3_upload(s, &at, fd, BYTES, sum, sent, &err);
    close(fd);
    return rc;
}

static void is_there(struct s3 *s, const char *key)
{
    struct s3_url at;
    struct s3_object o;
    char url[300], path[320];
    snprintf(url, sizeof url, "s3://models/%s", key);
    snprintf(path, sizeof path, "%s.back", file);
    assert_int_equal(s3_url_parse(url, &at, &err), ERR_OK);
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_OK);
    assert_int_equal(o.bytes, BYTES);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int64_t got = 0;
    if (s3_get(s, &at, fd, &got, BYTES, NULL, &err))
        fail_msg("%s", err.message);
    assert_int_equal(got, BYTES);
    close(fd);
    struct buffer back;
    buffer_init(&back, BYTES);
    assert_int_equal(fs_read_file(path, &back, &err), ERR_OK);
    assert_int_equal(back.len, BYTES);
    assert_memory_equal(back.data, data, BYTES);
    buffer_free(&back);
    unlink(path);
}

static void test_urls(void **state)
{
    struct s3_url at;
    (void)state;
    assert_int_equal(s3_url_parse("s3://my-bucket//a/b c/", &at, &err), ERR_OK);
    assert_string_equal(at.bucket, "my-bucket");
    assert_string_equal(at.key, "a/b c");
    assert_int_equal(s3_url_parse("s3://abc", &at, &err), ERR_OK);
    assert_string_equal(at.key, "");
    static const char *const bad[] = {"", "s3:/x", "http://bucket/x", "s3://", "s3://ab", "s3://UPPER/x", "s3://-ab/x",
                                      "s3://a b c/x"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(s3_url_parse(bad[i], &at, &err), ERR_INVALID);
}

static void test_in_parts_and_back(void **state)
{
    struct s3 *s = client();
    int64_t sent;
    (void)state;
    if (upload(s, "dir with blank/+~ä&.bin", &sent))
        fail_msg("%s", err.message);
    assert_int_equal(sent, BYTES);
    is_there(s, "dir with blank/+~ä&.bin");
    assert_int_equal(upload(s, "dir with blank/+~ä&.bin", &sent), ERR_OK);
    assert_int_equal(sent, 0); /* it is there */
    s3_close(s);
}

static int count(void *arg, const char *key, int64_t bytes, struct error *e)
{
    (void)key, (void)e;
    assert_int_equal(bytes, 3);
    ++*(int *)arg;
    return ERR_OK;
}

static void test_small_ones_listed_and_deleted(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models"}, prefix = {.bucket = "models", .key = "small/"};
    struct buffer text;
    int n = 0;
    (void)state;
    for (int i = 0; i < 7; i++) { /* the server's pages have 3 */
        snprintf(at.key, sizeof at.key, "small/%d", i);
        assert_int_equal(s3_put(s, &at, "abc", 3, NULL, &err), ERR_OK);
    }
    assert_int_equal(s3_list(s, &prefix, count, &n, &err), ERR_OK);
    assert_int_equal(n, 7);
    buffer_init(&text, 100);
    assert_int_equal(s3_get_text(s, &at, &text, &err), ERR_OK);
    assert_string_equal((char *)text.data, "abc");
    buffer_free(&text);
    assert_int_equal(s3_delete(s, &at, &err), ERR_OK);
    assert_int_equal(s3_delete(s, &at, &err), ERR_OK);
    assert_int_equal(s3_get_text(s, &at, &text, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.message, "s3://models/small/6"));
    s3_close(s);
}

static int none(void *arg, const char *key, int64_t bytes, struct error *e)
{
    (void)arg, (void)key, (void)bytes, (void)e;
    return ERR_INTERNAL;
}

/* Of what is in it nothing is known: it is neither gone nor deleted. */
static void test_a_bucket_that_is_not_there(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "nowhere", .key = "small/1"}, models = {.bucket = "models", .key = "small/1"};
    struct buffer text;
    int count_of = 0;
    (void)state;
    buffer_init(&text, 100);
    assert_int_equal(s3_delete(s, &at, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "NoSuchBucket"));
    assert_non_null(strstr(err.hint, "make the bucket nowhere"));
    assert_int_equal(s3_list(s, &at, none, NULL, &err), ERR_REFUSED);
    assert_int_equal(s3_abort_uploads(s, &at, NULL, &count_of, &err), ERR_REFUSED);
    assert_int_equal(s3_get_text(s, &at, &text, &err), ERR_REFUSED);
    assert_int_equal(s3_put(s, &at, "abc", 3, NULL, &err), ERR_REFUSED);
    /* What is behind a wrong address knows no codes. */
    faults("[{\"method\":\"GET\",\"match\":\"list-type\",\"status\":404,\"code\":\"\"}]");
    assert_int_equal(s3_list(s, &models, none, NULL, &err), ERR_REFUSED);
    buffer_free(&text);
    s3_close(s);
}

/* An endpoint that is another server: whatever it answers, nothing is gone and nothing is deleted. */
static void test_a_server_that_is_no_store(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models", .key = "elsewhere/1"};
    struct s3_object object;
    struct buffer text;
    int count_of = 0;
    (void)state;
    buffer_init(&text, 1000);
    faults("[{\"status\":404,\"code\":\"\",\"times\":100}]");
    assert_int_equal(s3_get_text(s, &at, &text, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "no object store"));
    assert_int_equal(s3_delete(s, &at, &err), ERR_REFUSED);
    assert_int_equal(s3_head(s, &at, &object, &err), ERR_NOT_FOUND); /* which has no room for a reason */
    faults("[{\"status\":200,\"body\":\"<html>welcome</html>\",\"times\":100}]");
    assert_int_equal(s3_list(s, &at, none, NULL, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "s3://models/"));
    assert_non_null(strstr(err.hint, "no object store"));
    assert_int_equal(s3_abort_uploads(s, &at, NULL, &count_of, &err), ERR_REFUSED);
    faults("[]");
    buffer_free(&text);
    s3_close(s);
}

static void test_failures_that_pass(void **state)
{
    struct s3 *s = client();
    int64_t sent;
    (void)state;
    faults("[{\"match\":\"partNumber=2\",\"times\":2,\"status\":503}, {\"match\":\"partNumber=3\",\"cut\":1000},"
           " {\"match\":\"partNumber=4\",\"status\":503,\"retry_after\":1}, {\"method\":\"POST\",\"status\":500},"
           " {\"method\":\"GET\",\"match\":\"retried.bin\",\"times\":2,\"cut\":70000}]");
    int64_t since = clock_mono_ns();
    if (upload(s, "retried.bin", &sent))
        fail_msg("%s", err.message);
    assert_true(clock_mono_ns() - since >= NS_PER_S); /* Retry-After */
    is_there(s, "retried.bin");
    faults("[]");
    s3_close(s);
}

static void test_an_upload_that_was_cut_goes_on(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models", .key = "cut/"};
    int64_t sent;
    int aborted;
    (void)state;
    faults("[{\"match\":\"partNumber=4\",\"status\":400,\"code\":\"Broken\"}]");
    assert_int_equal(upload(s, "cut/a.bin", &sent), ERR_INVALID);
    assert_non_null(strstr(err.message, "Broken"));
    assert_int_equal(sent, 3 * PART);
    s3_close(s);
    int first = requests("partNumber=1");
    s = client(); /* as after a kill */
    if (upload(s, "cut/a.bin", &sent))
        fail_msg("%s", err.message);
    assert_int_equal(sent, BYTES - 3 * PART);
    assert_int_equal(requests("partNumber=1"), first);
    is_there(s, "cut/a.bin");
    /* One that nobody goes on with. */
    faults("[{\"match\":\"partNumber=2\",\"status\":400}]");
    assert_int_equal(upload(s, "cut/b.bin", &sent), ERR_INVALID);
    assert_int_equal(s3_abort_uploads(s, &at, "cut/b", &aborted, &err), ERR_OK);
    assert_int_equal(aborted, 0);
    assert_int_equal(s3_abort_uploads(s, &at, "cut/a", &aborted, &err), ERR_OK);
    assert_int_equal(aborted, 1);
    if (upload(s, "cut/b.bin", &sent))
        fail_msg("%s", err.message);
    assert_int_equal(sent, BYTES);
    s3_close(s);
}

static void test_an_upload_given_up_by_others_begins_anew(void **state)
{
    struct s3 *s = client();
    int64_t sent;
    (void)state;
    faults("[{\"match\":\"partNumber=3\",\"status\":404,\"code\":\"NoSuchUpload\"}]");
    if (upload(s, "anew.bin", &sent))
        fail_msg("%s", err.message);
    is_there(s, "anew.bin");
    s3_close(s);
}

static void test_the_answer_to_the_last_request_is_lost(void **state)
{
    struct s3 *s = client();
    int64_t sent;
    (void)state;
    faults("[{\"method\":\"POST\",\"skip\":1,\"status\":500}]");
    if (upload(s, "lost.bin", &sent))
        fail_msg("%s", err.message);
    is_there(s, "lost.bin");
    s3_close(s);
}

static void test_damaged_here_is_no_object_there(void **state)
{
    struct s3 *s = client();
    int64_t sent;
    struct s3_url at = {.bucket = "models", .key = "bad.bin"};
    struct s3_object o;
    (void)state;
    sum ^= 1;
    assert_int_equal(upload(s, "bad.bin", &sent), ERR_CORRUPT);
    sum ^= 1;
    assert_int_equal(s3_head(s, &at, &o, &err), ERR_NOT_FOUND);
    s3_close(s);
}

static void test_wrong_credentials(void **state)
{
    struct s3 *s = client_of("wrong+secret", 5000);
    struct s3_url at = {.bucket = "models", .key = "x"};
    int before = requests("PUT /models/x");
    (void)state;
    assert_int_equal(s3_put(s, &at, "abc", 3, NULL, &err), ERR_REFUSED);
    assert_non_null(strstr(err.message, "SignatureDoesNotMatch"));
    assert_non_null(strstr(err.hint, "s3_credentials"));
    assert_null(strstr(err.message, "wrong+secret"));
    assert_int_equal(requests("PUT /models/x"), before + 1); /* not again and again */
    s3_close(s);
}

static void test_a_slow_server(void **state)
{
    struct s3 *s = client_of("secret/of+tests", 1500);
    struct s3_url at = {.bucket = "models", .key = "slow"};
    (void)state;
    faults("[{\"match\":\"slow\",\"delay\":3}, {\"match\":\"slow\",\"delay\":0.5}]");
    int before = requests("PUT /models/slow");
    if (s3_put(s, &at, "abc", 3, NULL, &err))
        fail_msg("%s", err.message);
    assert_true(requests("PUT /models/slow") >= before + 2); /* the first was given up, a later one waited for */
    s3_close(s);
}

static void test_stops_at_once(void **state)
{
    struct s3 *s = client();
    struct s3_url at = {.bucket = "models", .key = "x"};
    (void)state;
    atomic_store(&stop, true);
    assert_int_equal(s3_put(s, &at, "abc", 3, NULL, &err), ERR_CANCELLED);
    atomic_store(&stop, false);
    s3_close(s);
}

static void test_credentials_files(void **state)
{
    struct s3_credentials c;
    char path[320];
    (void)state;
    snprintf(path, sizeof path, "%s.keys", file);
    static const char text[] = "[default]\n# keys\naws_access_key_id = AKID\n  aws_secret_access_key=se/cr+et\r\n";
    assert_int_equal(fs_write_atomic(path, text, strlen(text), 0600, &err), ERR_OK);
    assert_int_equal(s3_credentials_file(path, geteuid(), &c, &err), ERR_OK);
    assert_string_equal(c.access_key, "AKID");
    assert_string_equal(c.secret_key, "se/cr+et");
    assert_string_equal(c.token, "");
    chmod(path, 0640);
    assert_int_equal(s3_credentials_file(path, geteuid(), &c, &err), ERR_REFUSED);
    assert_non_null(strstr(err.hint, "chmod 600"));
    assert_string_equal(c.secret_key, "");
    unlink(path);
    assert_int_equal(s3_credentials_file(path, geteuid(), &c, &err), ERR_NOT_FOUND);
    assert_int_equal(fs_write_atomic(path, "aws_access_key_id = A\n", 22, 0600, &err), ERR_OK);
    assert_int_equal(s3_credentials_file(path, geteuid(), &c, &err), ERR_INVALID);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_urls),
        cmocka_unit_test(test_in_parts_and_back),
        cmocka_unit_test(test_small_ones_listed_and_deleted),
        cmocka_unit_test(test_a_bucket_that_is_not_there),
        cmocka_unit_test(test_a_server_that_is_no_store),
        cmocka_unit_test(test_failures_that_pass),
        cmocka_unit_test(test_an_upload_that_was_cut_goes_on),
        cmocka_unit_test(test_an_upload_given_up_by_others_begins_anew),
        cmocka_unit_test(test_the_answer_to_the_last_request_is_lost),
        cmocka_unit_test(test_damaged_here_is_no_object_there),
        cmocka_unit_test(test_wrong_credentials),
        cmocka_unit_test(test_a_slow_server),
        cmocka_unit_test(test_stops_at_once),
        cmocka_unit_test(test_credentials_files),
    };
    return cmocka_run_group_tests(tests, start, end);
}
