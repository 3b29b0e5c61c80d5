/* constraint.h: recursive descent to postfix, and a stack of bits. */
#include "proto/constraint.h"

#include <string.h>

struct parser {
    const char *text, *s;
    struct constraint *out;
    int depth;
    struct error *err;
};

static const char label_bytes[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

static int bad(struct parser *p, const char *what)
{
    error_set(p->err, ERR_INVALID, "'%.200s' is not a constraint: %s at character %zu", p->text, what,
              (size_t)(p->s - p->text) + 1);
    return error_hint(p->err, "write labels joined by & | ! and parentheses: gpu=h200&!rack=r3|fast");
}

static void blanks(struct parser *p)
{
    p->s += strspn(p->s, " \t");
}

static int emit(struct parser *p, struct constraint_step step)
{
    if (p->out->n == CONSTRAINT_STEPS)
        return bad(p, "too many parts");
    p->out->steps[p->out->n++] = step;
    return ERR_OK;
}

static int parse_any(struct parser *p);

static int parse_label(struct parser *p)
{
    struct constraint_step step = {.op = 'k', .key = p->s};
    step.key_len = (uint16_t)strspn(p->s, label_bytes);
    if (!step.key_len)
        return bad(p, *p->s ? "no label" : "a label is missing");
    p->s += step.key_len;
    blanks(p);
    if (*p->s == '=') {
        p->s++;
        blanks(p);
        step.op = '=';
        step.value = p->s;
        step.value_len = (uint16_t)strspn(p->s, label_bytes);
        if (!step.value_len)
            return bad(p, "no value");
        p->s += step.value_len;
        blanks(p);
    }
    return emit(p, step);
}

static int parse_one(struct parser *p)
{
    int rc;
    blanks(p);
    if (++p->depth > CONSTRAINT_DEPTH)
        return bad(p, "too deep");
    if (*p->s == '!') {
        p->s++;
        rc = parse_one(p);
        rc = rc ? rc : emit(p, (struct constraint_step){.op = '!'});
    } else if (*p->s == '(') {
        p->s++;
        rc = parse_any(p);
        if (!rc && *p->s != ')')
            rc = bad(p, "a parenthesis that does not close");
        p->s += !rc;
        blanks(p);
    } else {
        rc = parse_label(p);
    }
    p->depth--;
    return rc;
}

static int parse_all(struct parser *p)
{
    int rc = parse_one(p);
    while (!rc && *p->s == '&') {
        p->s++;
        rc = parse_one(p);
        rc = rc ? rc : emit(p, (struct constraint_step){.op = '&'});
    }
    return rc;
}

static int parse_any(struct parser *p)
{
    int rc = parse_all(p);
    while (!rc && *p->s == '|') {
        p->s++;
        rc = parse_all(p);
        rc = rc ? rc : emit(p, (struct constraint_step){.op = '|'});
    }
    return rc;
}

int constraint_compile(const char *text, struct constraint *out, struct error *err)
{
    struct parser p = {.text = text, .s = text, .out = out, .err = err};
    out->n = 0;
    if (strlen(text) > CONSTRAINT_MAX)
        return error_set(err, ERR_INVALID, "a constraint has %zu bytes, the limit is %d", strlen(text), CONSTRAINT_MAX);
    blanks(&p);
    if (!*p.s)
        return ERR_OK;
    int rc = parse_any(&p);
    if (!rc && *p.s)
        rc = bad(&p, "a character that does not belong there");
    return rc;
}

bool constraint_holds(const struct constraint *c, const char *(*value_of)(const void *arg, const char *key, size_t len),
                      const void *arg)
{
    bool stack[CONSTRAINT_STEPS];
    int top = 0;
    for (int i = 0; i < c->n; i++) {
        const struct constraint_step *s = &c->steps[i];
        const char *value;
        switch (s->op) {
        case '!':
            stack[top - 1] = !stack[top - 1];
            break;
        case '&':
            top--;
            stack[top - 1] = stack[top - 1] && stack[top];
            break;
        case '|':
            top--;
            stack[top - 1] = stack[top - 1] || stack[top];
            break;
        default:
            value = value_of(arg, s->key, s->key_len);
            stack[top++] = value && (s->op == 'k' ||
                                     (strlen(value) == s->value_len && memcmp(value, s->value, s->value_len) == 0));
        }
    }
    return top == 0 || stack[0];
}
