// Tensors as pointers, and the element types that every operator takes, on a CPU and on a GPU alike.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "../include/drafttrain/floats.h"

namespace drafttrain {

template <typename T>
T* data(const torch::stable::Tensor& x) {
    return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* data(const std::optional<torch::stable::Tensor>& x) {
    return x ? static_cast<T*>(x->data_ptr()) : nullptr;
}

// f(T()) for the element type T of x.
template <typename F>
void by_type(const torch::stable::Tensor& x, F f) {
    using torch::headeronly::ScalarType;
    if (x.scalar_type() == ScalarType::Float)
        f(float());
    else if (x.scalar_type() == ScalarType::BFloat16)
        f(BFloat16());
    else if (x.scalar_type() == ScalarType::Half)
        f(Float16());
    else
        STD_TORCH_CHECK(false, "the operators take float32, bfloat16 and float16");
}

}  // namespace drafttrain
