/* SigV4 against published vectors: AWS's test suite (aws-sig-v4-test-suite) and the examples of the S3 API reference
 * ("Signature Calculations for the Authorization Header"). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
/* after the standard headers */
#include <cmocka.h>

#include "daemon/remote/sigv4.h"

#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define N(a)  (sizeof(a) / sizeof *(a))

static void ends_with(const struct sigv4_request *r, const char *signature)
{
    struct buffer out;
    struct error err;
    buffer_init(&out, 4096);
    assert_int_equal(sigv4_authorization(r, &out, &err), ERR_OK);
    const char *at = strstr((char *)out.data, "Signature=");
    assert_non_null(at);
    assert_string_equal(at + strlen("Signature="), signature);
    assert_null(strstr((char *)out.data, r->secret_key));
    buffer_free(&out);
}

static struct sigv4_request suite(const char *method, const struct sigv4_pair *headers, size_t n)
{
    return (struct sigv4_request){.method = method, .path = "/", .headers = headers, .n_headers = n,
                                  .payload_hash = EMPTY, .date = "20150830T123600Z", .region = "us-east-1",
                                  .service = "service", .access_key = "AKIDEXAMPLE",
                                  .secret_key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"};
}

static const struct sigv4_pair suite_headers[] = {{"host", "example.amazonaws.com"},
                                                  {"x-amz-date", "20150830T123600Z"}};

static void test_suite_vanilla(void **state)
{
    (void)state;
    struct sigv4_request r = suite("GET", suite_headers, N(suite_headers));
    ends_with(&r, "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
    r.method = "POST";
    ends_with(&r, "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b");
}

static void test_suite_query_order(void **state)
{
    (void)state;
    static const struct sigv4_pair query[] = {{"Param2", "value2"}, {"Param1", "value1"}};
    struct sigv4_request r = suite("GET", suite_headers, N(suite_headers));
    r.query = query;
    r.n_query = N(query);
    ends_with(&r, "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500");
}

static struct sigv4_request example(const char *method, const char *path, const struct sigv4_pair *headers, size_t n)
{
    return (struct sigv4_request){.method = method, .path = path, .headers = headers, .n_headers = n,
                                  .payload_hash = EMPTY, .date = "20130524T000000Z", .region = "us-east-1",
                                  .service = "s3", .access_key = "AKIAIOSFODNN7EXAMPLE",
                                  .secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
}

static void test_s3_get_object(void **state)
{
    (void)state;
    static const struct sigv4_pair headers[] = {{"host", "examplebucket.s3.amazonaws.com"}, {"range", "bytes=0-9"},
                                                {"x-amz-content-sha256", EMPTY}, {"x-amz-date", "20130524T000000Z"}};
    struct sigv4_request r = example("GET", "/test.txt", headers, N(headers));
    ends_with(&r, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

static void test_s3_put_object(void **state)
{
    (void)state;
    char hash[SIGV4_HASH];
    static const char body[] = "Welcome to Amazon S3.";
    struct buffer path;
    sigv4_hash(body, sizeof body - 1, hash);
    const struct sigv4_pair headers[] = {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                         {"host", "examplebucket.s3.amazonaws.com"}, {"x-amz-content-sha256", hash},
                                         {"x-amz-date", "20130524T000000Z"},
                                         {"x-amz-storage-class", "REDUCED_REDUNDANCY"}};
    buffer_init(&path, 100);
    assert_int_equal(sigv4_encode(&path, "/test$file.text", true), ERR_OK);
    struct sigv4_request r = example("PUT", (char *)path.data, headers, N(headers));
    r.payload_hash = hash;
    ends_with(&r, "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
    buffer_free(&path);
}

static void test_s3_lists(void **state)
{
    (void)state;
    static const struct sigv4_pair headers[] = {{"host", "examplebucket.s3.amazonaws.com"},
                                                {"x-amz-content-sha256", EMPTY}, {"x-amz-date", "20130524T000000Z"}};
    static const struct sigv4_pair lifecycle[] = {{"lifecycle", ""}}, list[] = {{"prefix", "J"}, {"max-keys", "2"}};
    struct sigv4_request r = example("GET", "/", headers, N(headers));
    r.query = lifecycle;
    r.n_query = 1;
    ends_with(&r, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    r.query = list;
    r.n_query = 2;
    ends_with(&r, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

static void test_dates_and_hashes(void **state)
{
    (void)state;
    char date[SIGV4_DATE], hash[SIGV4_HASH];
    sigv4_date(1440938160, date);
    assert_string_equal(date, "20150830T123600Z");
    sigv4_hash("", 0, hash);
    assert_string_equal(hash, EMPTY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_suite_vanilla), cmocka_unit_test(test_suite_query_order),
        cmocka_unit_test(test_s3_get_object), cmocka_unit_test(test_s3_put_object),
        cmocka_unit_test(test_s3_lists),      cmocka_unit_test(test_dates_and_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
