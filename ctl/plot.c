/* plot.h */
#include "ctl/plot.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DOTS_X = 2, DOTS_Y = 4, LABEL = 9 };

struct canvas {
    int width, height; /* cells */
    bool unicode;
    uint8_t *dots; /* Braille bits of a cell */
    double x0, x1, y0, y1;
};

/* The bit of dot (dx, dy) in a Braille cell, U+2800 + bits. */
static uint8_t braille_bit(int dx, int dy)
{
    static const uint8_t bits[DOTS_Y][DOTS_X] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    return bits[dy][dx];
}

static void set_dot(struct canvas *c, int x, int y)
{
    int w = c->width * DOTS_X, h = c->height * DOTS_Y;
    if (x < 0 || y < 0 || x >= w || y >= h)
        return;
    y = h - 1 - y;
    c->dots[(y / DOTS_Y) * c->width + x / DOTS_X] |= braille_bit(x % DOTS_X, y % DOTS_Y);
}

static int dot_x(const struct canvas *c, double x)
{
    return (int)lround((x - c->x0) / (c->x1 - c->x0) * (c->width * DOTS_X - 1));
}

static int dot_y(const struct canvas *c, double y)
{
    return (int)lround((y - c->y0) / (c->y1 - c->y0) * (c->height * DOTS_Y - 1));
}

static void draw_segment(struct canvas *c, int xa, int ya, int xb, int yb)
{
    int steps = abs(xb - xa) > abs(yb - ya) ? abs(xb - xa) : abs(yb - ya);
    for (int i = 0; i <= steps; i++) {
        double f = steps ? (double)i / steps : 0;
        set_dot(c, (int)lround(xa + f * (xb - xa)), (int)lround(ya + f * (yb - ya)));
    }
}

static bool finite_point(const struct plot_point *p)
{
    return isfinite(p->x) && isfinite(p->y);
}

static size_t fit_axes(struct canvas *c, const struct plot_point *points, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const struct plot_point *p = &points[i];
        if (!finite_point(p))
            continue;
        c->x0 = !count || p->x < c->x0 ? p->x : c->x0;
        c->x1 = !count || p->x > c->x1 ? p->x : c->x1;
        c->y0 = !count || p->y < c->y0 ? p->y : c->y0;
        c->y1 = !count || p->y > c->y1 ? p->y : c->y1;
        count++;
    }
    if (c->x1 <= c->x0)
        c->x1 = c->x0 + 1;
    if (c->y1 <= c->y0)
        c->y1 = c->y0 + 1;
    return count;
}

static void print_cell(FILE *out, const struct canvas *c, uint8_t bits)
{
    if (!bits)
        putc(' ', out);
    else if (!c->unicode)
        putc('*', out);
    else /* U+2800 + bits in UTF-8 */
        fprintf(out, "\xe2%c%c", 0xa0 + (bits >> 6), 0x80 + (bits & 0x3f));
}

static void print_rows(FILE *out, const struct canvas *c)
{
    for (int row = 0; row < c->height; row++) {
        bool label = row == 0 || row == c->height - 1 || row == c->height / 2;
        double y = c->y1 - (c->y1 - c->y0) * (c->height > 1 ? (double)row / (c->height - 1) : 0);
        if (label)
            fprintf(out, "%*.4g ", LABEL - 1, y);
        else
            fprintf(out, "%*s", LABEL, "");
        fputs(c->unicode ? "\xe2\x94\x82" : "|", out); /* U+2502 */
        for (int col = 0; col < c->width; col++)
            print_cell(out, c, c->dots[row * c->width + col]);
        putc('\n', out);
    }
}

static void print_axis(FILE *out, const struct canvas *c, const double *marks, size_t n_marks)
{
    fprintf(out, "%*s%s", LABEL, "", c->unicode ? "\xe2\x94\x94" : "+"); /* U+2514 */
    for (int col = 0; col < c->width; col++)
        fputs(c->unicode ? "\xe2\x94\x80" : "-", out); /* U+2500 */
    putc('\n', out);
    if (n_marks) {
        fprintf(out, "%*s ", LABEL, "");
        for (int col = 0; col < c->width; col++) {
            bool here = false;
            for (size_t i = 0; i < n_marks; i++)
                here |= dot_x(c, marks[i]) / DOTS_X == col;
            putc(here ? '^' : ' ', out);
        }
        fputs(" restart\n", out);
    }
    char right[32];
    int used = snprintf(right, sizeof right, "%.6g", c->x1);
    fprintf(out, "%*s %-*.6g%s\n", LABEL, "", c->width - used, c->x0, right);
}

void plot_print(FILE *out, const char *title, const struct plot_point *points, size_t n, const double *marks,
                size_t n_marks, int width, int height, bool unicode)
{
    struct canvas c = {.width = width, .height = height, .unicode = unicode};
    if (!fit_axes(&c, points, n)) {
        fprintf(out, "%s: no points yet\n", title);
        return;
    }
    c.dots = calloc((size_t)width * (size_t)height, 1);
    if (!c.dots)
        return;
    const struct plot_point *before = NULL;
    for (size_t i = 0; i < n; i++) {
        if (!finite_point(&points[i]))
            continue;
        /* x going back is a replay after a restart: no line across it */
        const struct plot_point *from = before && before->x <= points[i].x ? before : &points[i];
        draw_segment(&c, dot_x(&c, from->x), dot_y(&c, from->y), dot_x(&c, points[i].x), dot_y(&c, points[i].y));
        before = &points[i];
    }
    fprintf(out, "%*s %s\n", LABEL, "", title);
    print_rows(out, &c);
    print_axis(out, &c, marks, n_marks);
    free(c.dots);
}
