/* A line plot for terminals: dots of 2 x 4 to a cell in Unicode, '*' in ASCII. */
#ifndef BOOST_CTL_PLOT_H
#define BOOST_CTL_PLOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct plot_point {
    double x, y; /* points that are not finite are left out */
};

/* `marks` are x positions shown below the axis with '^' (restarts). Width and height are cells of the
 * plot area. Prints nothing but a note when fewer than one point is finite. */
void plot_print(FILE *out, const char *title, const struct plot_point *points, size_t n, const double *marks,
                size_t n_marks, int width, int height, bool unicode);

#endif
