/* What a compiled kernel asks of its host, answered by the CUDA runtime that torch has loaded.
 *
 * The compiler's own runtime is a library of its package, which is not there where an export runs.
 * An object asks for these names alone. Calls into CUDA are bound when they are made, so an export
 * loads on a machine without CUDA, too. */

#include <stdio.h>

typedef void (*SetError)(const char *kind, const char *message);
typedef void (*SetErrorParts)(const char *kind, const char **parts, int count);

extern int cudaDeviceGetAttribute(int *, int, int);
extern int cudaFuncSetAttribute(const void *, int, int);
extern int cudaGetDevice(int *);
extern int cudaGetDeviceCount(int *);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
extern const char *cudaGetErrorName(int);
extern const char *cudaGetErrorString(int);
extern int cudaKernelSetAttributeForDevice(void *, int, int, int);
extern int cudaLaunchKernelExC(const void *, const void *, void **);
extern int cudaLibraryGetKernel(void **, void *, const char *);
extern int cudaLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
extern int cudaLibraryUnload(void *);
extern int cudaSetDevice(int);

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
int _cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
  return cudaFuncSetAttribute(kernel, attribute, value);
}
int _cudaGetDevice(int *device) { return cudaGetDevice(device); }
int _cudaSetDevice(int device) { return cudaSetDevice(device); }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}
int _cudaLaunchKernelEx(const void *config, const void *kernel, void **arguments) {
  return cudaLaunchKernelExC(config, kernel, arguments);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  return cudaLibraryGetKernel(kernel, library, name);
}
int _cudaLibraryLoadData(void **library, const void *code, void *options, void *values, unsigned count,
                         void *more, void *more_values, unsigned more_count) {
  return cudaLibraryLoadData(library, code, options, values, count, more, more_values, more_count);
}

/* The one function of the driver that has no twin in the runtime. */
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  int (*get)(int *, int, void *, int) = NULL;
  int found = 0;
  int error = cudaGetDriverEntryPointByVersion("cuKernelGetAttribute", (void **)&get, 12000, 0, &found);
  if (error == 0 && get == NULL) error = 500; /* cudaErrorSymbolNotFound */
  return error ? error : get(value, attribute, kernel, device);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(SetErrorParts set, int error) {
  const char *parts[] = {"CUDA: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"};
  set("RuntimeError", parts, 5);
}

/* Loads a kernel's code the first time, for every GPU that can run it; 0, or -1 with an error set. */
int cuda_dialect_init_library_once(void **slot, int (*load)(void **), int (*prepare)(void **, int),
                                   SetError set) {
  static char busy;
  void *library = NULL;
  int count = 0, ready = 0, error = 0;
  if (__atomic_load_n(slot, __ATOMIC_ACQUIRE)) return 0;
  while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {
  }
  if (!*slot) {
    error = load(&library);
    if (!error) error = cudaGetDeviceCount(&count);
    for (int device = 0; !error && prepare && device < count; device++) ready += !prepare(&library, device);
    if (!error && prepare && count && !ready) error = prepare(&library, 0);
    if (!error) __atomic_store_n(slot, library, __ATOMIC_RELEASE);
  }
  __atomic_clear(&busy, __ATOMIC_RELEASE);
  if (error) {
    char message[512];
    snprintf(message, sizeof message, "CUDA: %s (%s)", cudaGetErrorString(error), cudaGetErrorName(error));
    set("RuntimeError", message);
  }
  return error ? -1 : 0;
}

void cuda_dialect_unload_library_once(void **slot) {
  void *library = __atomic_exchange_n(slot, NULL, __ATOMIC_ACQ_REL);
  if (library) cudaLibraryUnload(library);
}
