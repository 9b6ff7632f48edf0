/* Runs a program file and prints the five largest values of its first output.
 *
 *     classify MODEL.lap [INPUT]
 *
 * INPUT is a file of raw float32 values for the first input (for an image: channels, rows, columns, as the model wants them);
 * without it the input is random. Dynamic sizes get their least value, and at least 1.
 */
#include "lapilli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, lapilli_last_error());
  return EXIT_FAILURE;
}

/* A tensor as the spec wants it, in memory of its own; data is NULL when that fails. */
static lapilli_tensor allocate(const lapilli_spec *spec) {
  static const uint64_t sizes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8}; /* by lapilli_dtype */
  lapilli_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.rank = spec->rank;
  tensor.dtype = spec->dtype;
  tensor.size = sizes[spec->dtype];
  for (uint32_t axis = 0; axis < spec->rank; ++axis) {
    tensor.shape[axis] = spec->shape[axis] >= 0 ? spec->shape[axis] : spec->min[axis] > 1 ? spec->min[axis] : 1;
    tensor.size *= (uint64_t)tensor.shape[axis];
  }
  tensor.data = calloc(tensor.size > 0 ? (size_t)tensor.size : 1, 1);
  return tensor;
}

static int fill(lapilli_tensor *tensor, const char *path) {
  if (path != NULL) {
    FILE *file = fopen(path, "rb");
    const size_t size = file != NULL ? fread(tensor->data, 1, (size_t)tensor->size, file) : 0;
    const int more = file != NULL && fgetc(file) != EOF;
    if (file != NULL)
      fclose(file);
    if (size != tensor->size || more) {
      fprintf(stderr, "%s must be a file of %llu bytes: raw float32 values for the input.\n", path,
              (unsigned long long)tensor->size);
      return 0;
    }
    return 1;
  }
  for (uint64_t i = 0; tensor->dtype == LAPILLI_FLOAT32 && i < tensor->size / sizeof(float); ++i)
    ((float *)tensor->data)[i] = (float)rand() / (float)RAND_MAX;
  return 1;
}

static void print_top(const float *values, uint64_t count) {
  int64_t previous = -1;
  for (int place = 1; place <= 5 && (uint64_t)place <= count; ++place) {
    int64_t best = -1;
    for (uint64_t i = 0; i < count; ++i) {
      /* Smaller than the one before, or equal and later. */
      const int after =
          previous < 0 || values[i] < values[previous] || (values[i] == values[previous] && (int64_t)i > previous);
      if (after && (best < 0 || values[i] > values[best]))
        best = (int64_t)i;
    }
    if (best < 0)
      break; /* only NaNs are left */
    printf("%d. index %lld: %g\n", place, (long long)best, (double)values[best]);
    previous = best;
  }
}

int main(int argc, char **argv) {
  if (argc < 2 || argc > 3) {
    fprintf(stderr, "usage: %s MODEL.lap [INPUT]\n", argv[0]);
    return 2;
  }
  lapilli_program *program = NULL;
  if (lapilli_load(argv[1], NULL, &program) != LAPILLI_OK)
    return fail("load");

  lapilli_method_info method;
  if (lapilli_method(program, 0, &method) != LAPILLI_OK)
    return fail("method");
  lapilli_tensor *inputs = calloc(method.inputs + 1u, sizeof *inputs);
  int ready = inputs != NULL;
  for (uint32_t i = 0; ready && i < method.inputs; ++i) {
    lapilli_spec spec;
    if (lapilli_input_spec(program, 0, i, &spec) != LAPILLI_OK)
      return fail("input");
    inputs[i] = allocate(&spec);
    ready = inputs[i].data != NULL && fill(&inputs[i], i == 0 && argc == 3 ? argv[2] : NULL);
  }

  int result = EXIT_FAILURE;
  lapilli_run *run = NULL;
  lapilli_tensor output;
  if (!ready)
    fprintf(stderr, "The inputs could not be prepared.\n");
  else if (lapilli_submit(program, 0, inputs, method.inputs, &run) != LAPILLI_OK ||
           lapilli_wait(run, UINT64_MAX) != LAPILLI_OK || lapilli_output(run, 0, &output) != LAPILLI_OK)
    fail("run");
  else if (output.dtype != LAPILLI_FLOAT32)
    fprintf(stderr, "The output is not float32.\n");
  else {
    print_top(output.data, output.size / sizeof(float));
    result = EXIT_SUCCESS;
  }

  lapilli_release(run);
  for (uint32_t i = 0; inputs != NULL && i < method.inputs; ++i)
    free(inputs[i].data);
  free(inputs);
  lapilli_destroy(program);
  return result;
}
