/* Who is gone: a rank that left in order is no loss, one that left without a word is, and what one rank knows the
 * others hear. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/support/fake_agent.h"
#include "worker/comm/peers.h"
#include "worker/rendezvous.h"

enum { RANKS = 4, CONNECT_MS = 20000, NEWS_MS = 20000 };

struct rank {
    pthread_t thread;
    const char *socket;
    int rank, rc;
    struct error err;
    struct peers *peers;
};

static struct rank ranks[RANKS];
static char dir[64], path[96];
static struct fake_agent *agent;

static void *come(void *arg)
{
    struct rank *r = arg;
    struct rendezvous_client client;
    r->rc = rendezvous_open(&client, r->socket, 1, 1, r->rank, CONNECT_MS, &r->err);
    if (r->rc)
        return NULL;
    struct rendezvous rv = rendezvous_table(&client);
    r->rc = peers_connect(r->rank, RANKS, "127.0.0.1", &rv, CONNECT_MS, &r->peers, &r->err);
    rendezvous_close(&client);
    return NULL;
}

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/boost-peers-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/rv.sock", dir);
    agent = fake_agent_start(path);
    int bad = agent ? 0 : -1;
    for (int i = 0; i < RANKS && agent; i++) {
        ranks[i] = (struct rank){.socket = path, .rank = i};
        bad |= pthread_create(&ranks[i].thread, NULL, come, &ranks[i]);
    }
    for (int i = 0; i < RANKS && agent; i++) {
        pthread_join(ranks[i].thread, NULL);
        bad |= ranks[i].rc;
    }
    return bad;
}

static void leave(int rank)
{
    peers_close(ranks[rank].peers);
    ranks[rank].peers = NULL;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < RANKS; i++)
        leave(i);
    fake_agent_stop(agent);
    unlink(path);
    return rmdir(dir);
}

static void nobody_is_blamed_while_all_are_there(void **state)
{
    (void)state;
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(peers_blame(ranks[i].peers, 0), -1);
}

/* Ranks 0 and 1 leave first, in order; it is rank 3 that is lost. */
static void who_says_that_it_leaves_is_not_blamed(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        peers_leave(ranks[i].peers);
        leave(i);
    }
    assert_int_equal(peers_blame(ranks[2].peers, 50), -1);
    leave(3);
    assert_int_equal(peers_blame(ranks[2].peers, NEWS_MS), 3);
}

/* Rank 2 is lost; rank 1 says so and leaves because of it: rank 3, which hears of both, blames rank 2. */
static void the_first_loss_is_blamed(void **state)
{
    (void)state;
    leave(2);
    assert_int_equal(peers_blame(ranks[1].peers, NEWS_MS), 2);
    leave(1);
    assert_int_equal(peers_blame(ranks[3].peers, NEWS_MS), 2);
    assert_int_equal(peers_blame(ranks[0].peers, NEWS_MS), 2);
    assert_int_equal(peers_blame(ranks[0].peers, 0), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(nobody_is_blamed_while_all_are_there, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_says_that_it_leaves_is_not_blamed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_first_loss_is_blamed, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
