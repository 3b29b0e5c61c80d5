/* number.h */
#include "proto/base/number.h"

#include <float.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static locale_t c_locale;
static pthread_once_t c_locale_once = PTHREAD_ONCE_INIT;

/* glibc has "C" built in: this cannot fail, and without it the process's locale stands. */
static void make_c_locale(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

double number_to_double(const char *text, char **end)
{
    pthread_once(&c_locale_once, make_c_locale);
    return c_locale ? strtod_l(text, end, c_locale) : strtod(text, end);
}

bool number_same_float(double a, double b)
{
    return (float)a == (float)b;
}

/* Digits grow until the text reads back to v, seen through a float when narrow. */
static char *shortest(double v, int narrow, char out[NUMBER_TEXT])
{
    if (isnan(v) || isinf(v)) {
        snprintf(out, NUMBER_TEXT, "%s", isnan(v) ? "nan" : v < 0 ? "-inf" : "inf");
        return out;
    }
    pthread_once(&c_locale_once, make_c_locale);
    locale_t old = c_locale ? uselocale(c_locale) : (locale_t)0;
    /* 15 digits always survive and %g drops their zeros, so fewer need no try; a
     * denormal has less precision than that, and a float 6. */
    int first = fabs(v) < DBL_MIN ? 1 : narrow ? (fabs(v) < (double)FLT_MIN ? 1 : 6) : 15;
    for (int digits = first; digits <= 17; digits++) {
        snprintf(out, NUMBER_TEXT, "%.*g", digits, v);
        double back = strtod(out, NULL);
        if (narrow ? (float)back == (float)v : back == v)
            break;
    }
    if (old)
        uselocale(old);
    return out;
}

char *number_from_double(double v, char out[NUMBER_TEXT])
{
    return shortest(v, 0, out);
}

char *number_from_float(float v, char out[NUMBER_TEXT])
{
    return shortest((double)v, 1, out);
}
