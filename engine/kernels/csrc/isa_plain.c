/* The kernels for any processor. */
#include "kernels.h"
#include "lanes_plain.h"

#define TABLE kernels_plain
#define TABLE_NAME "plain"
#include "body.h"
