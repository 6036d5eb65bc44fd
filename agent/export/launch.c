/* Launches the folds of partials, which Triton compiled: in one call of few numbers, by the CUDA runtime
 * that torch has loaded. Functions are called by apache-tvm-ffi, whose arguments are these. */

#include <stdint.h>

typedef struct {
  int32_t kind; /* 1 of an integer, 3 of a float */
  uint32_t padding;
  union {
    int64_t integer;
    double number;
  };
} Value;

typedef struct {
  unsigned grid[3], block[3];
  uint64_t shared;
  void *stream;
  void *attributes;
  unsigned count;
} Launch;

typedef struct {
  int32_t id;
  char padding[4];
  union {
    int32_t value;
    char size[64];
  };
} Attribute;

enum { POINTERS = 2, FIRST = 5, MOST = 16, OVERLAP = 6 /* cudaLaunchAttributeProgrammaticStreamSerialization */ };

extern int cudaLaunchKernelExC(const void *, const void *, void **);
extern int cudaLibraryGetKernel(void **, void *, const char *);
extern int cudaLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);

/* Takes the addresses of code and of its kernel's name. Gives a handle, or the negative of an error. */
int __tvm_ffi_load(void *self, const Value *given, int32_t count, Value *result) {
  void *library = 0, *kernel = 0;
  int error = cudaLibraryLoadData(&library, (void *)given[0].integer, 0, 0, 0, 0, 0, 0);
  if (!error) error = cudaLibraryGetKernel(&kernel, library, (char *)given[1].integer);
  *result = (Value){.kind = 1, .integer = error ? -error : (int64_t)kernel};
  return 0;
}

/* Takes a handle, blocks, threads, shared bytes, a stream, two addresses, and numbers of 32 bits. It may
 * start before what the stream runs has ended, since such a kernel waits for that. Gives an error, or 0. */
int __tvm_ffi_launch(void *self, const Value *given, int32_t count, Value *result) {
  union {
    int64_t address;
    int32_t integer;
    float number;
  } values[MOST] = {0}; /* two further addresses, of scratch memory that no fold takes, are zero */
  void *arguments[MOST];
  Attribute overlap = {.id = OVERLAP, .value = 1};
  Launch launch = {{(unsigned)given[1].integer, 1, 1}, {(unsigned)given[2].integer, 1, 1},
                   (uint64_t)given[3].integer, (void *)given[4].integer, &overlap, 1};
  *result = (Value){.kind = 1, .integer = 1}; /* cudaErrorInvalidValue */
  if (count - FIRST > MOST - POINTERS) return 0;
  for (int i = 0; i < MOST; i++) arguments[i] = &values[i];
  for (int i = 0; i < count - FIRST; i++) {
    const Value *value = &given[FIRST + i];
    if (i < POINTERS) values[i].address = value->integer;
    else if (value->kind == 3) values[i].number = (float)value->number;
    else values[i].integer = (int32_t)value->integer;
  }
  result->integer = cudaLaunchKernelExC(&launch, (void *)given[0].integer, arguments);
  return 0;
}
