// The namespace of the operators that the emulator runs; their launchers are the CUDA sources, compiled beside this.
#include "../../kernels/csrc/schema.h"

STABLE_TORCH_LIBRARY(drafttrain_emulated, m) { drafttrain::define(m); }
