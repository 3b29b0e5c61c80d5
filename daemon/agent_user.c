/* agent_user.h. The raw system calls change one thread; glibc's wrappers would change all. */
#include "daemon/agent_user.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PASSWD_TEXT = 16 << 10 };

int as_user_groups(uid_t uid, gid_t gid, gid_t groups[AS_USER_GROUPS])
{
    struct passwd entry, *found = NULL;
    char text[PASSWD_TEXT];
    int count = AS_USER_GROUPS;
    groups[0] = gid;
    if (getpwuid_r(uid, &entry, text, sizeof text, &found) || !found)
        return 1;
    return getgrouplist(entry.pw_name, gid, groups, &count) < 0 ? 1 : count;
}

int as_user_begin(struct as_user *u, uid_t uid, gid_t gid, struct error *err)
{
    gid_t groups[AS_USER_GROUPS];
    u->changed = false;
    if (geteuid() == uid)
        return ERR_OK;
    if (geteuid() != 0) {
        error_set(err, ERR_REFUSED, "this agent runs as uid %u and cannot act for uid %u", (unsigned)geteuid(),
                  (unsigned)uid);
        return error_hint(err, "run boost-agent as root, or submit as its user");
    }
    u->group_count = getgroups(AS_USER_GROUPS, u->groups);
    int count = as_user_groups(uid, gid, groups);
    if (u->group_count < 0 || syscall(SYS_setgroups, (size_t)count, groups) < 0)
        return error_errno(err, errno, "cannot take the groups of uid %u", (unsigned)uid);
    u->changed = true;
    setfsgid(gid);
    setfsuid(uid);
    /* They report nothing but the identity before; asking again tells whether it took. */
    if ((uid_t)setfsuid(uid) != uid || (gid_t)setfsgid(gid) != gid) {
        as_user_end(u);
        return error_set(err, ERR_REFUSED, "cannot act for uid %u", (unsigned)uid);
    }
    return ERR_OK;
}

void as_user_end(struct as_user *u)
{
    if (!u->changed)
        return;
    setfsuid(geteuid());
    setfsgid(getegid());
    if (syscall(SYS_setgroups, (size_t)u->group_count, u->groups) < 0)
        abort(); /* a thread that keeps a user's groups must not serve another user */
    u->changed = false;
}
