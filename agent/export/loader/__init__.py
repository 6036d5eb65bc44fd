"""The loader of an exported repository: kernels as functions and torch operators.

- Its modules stand there beside `kernels.json`, objects and their digests, with two more of this
  package that they import; their imports alone are written otherwise.
- They need torch and apache-tvm-ffi, and read all they know of a kernel from data.
- A call is checked once for each signature of its arguments; what was found is kept as a plan.
- An object is read, held against its digest and loaded when a call first needs it.
"""
