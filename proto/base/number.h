/* Numbers as text, the same in every locale. */
#ifndef BOOST_PROTO_BASE_NUMBER_H
#define BOOST_PROTO_BASE_NUMBER_H

#include <stdbool.h>

enum { NUMBER_TEXT = 32 };
/* The fewest digits that read back to the same value ("0.001", "1e-08", "inf",
 * "-inf", "nan"); returns out. */
char *number_from_double(double v, char out[NUMBER_TEXT]);
char *number_from_float(float v, char out[NUMBER_TEXT]);
/* strtod in the C locale; *end as there. */
double number_to_double(const char *text, char **end);
/* Whether both round to one float: programs that keep a constant in fp32 write it so. */
bool number_same_float(double a, double b);

#endif
