// Sixteen floats at a time, in the compiler's own vector type: one source for AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#include "floats.h"

namespace drafttrain {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

// A register. Without AVX-512 a `Floats` takes several, and compilers keep sums of that type in memory.
#ifdef __AVX512F__
typedef Floats Register;
constexpr int kSums = 16;  // registers that hold sums, out of 32
#else
typedef float Register __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kSums = 8;  // out of 16
#endif
constexpr int kRegister = sizeof(Register) / sizeof(float);

// By an unaligned access: with AVX2, GCC copies 32 bytes by way of the stack.
inline Register load_register(const float* p) { return *reinterpret_cast<const Register*>(p); }

inline void store_register(float* p, Register v) { *reinterpret_cast<Register*>(p) = v; }

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline void store(float* p, Floats v) { *reinterpret_cast<Floats*>(p) = v; }

// Keeps a value in its register. Compilers would load it again for each product, and loads are the bottleneck.
inline void pin([[maybe_unused]] Register& v) {
#ifdef __AVX512F__
    asm("" : "+v"(v));
#endif
}

inline Floats all(float x) { return x - Floats{}; }

template <typename V>
V max(V a, V b) {
    return a > b ? a : b;
}

template <typename V>
V min(V a, V b) {
    return a < b ? a : b;
}

// Combines halves until one value is left, so that the order of the lanes is the same on every processor.
template <typename F>
float fold(Floats v, F f) {
    float lane[kLanes];
    std::memcpy(lane, &v, sizeof(v));
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = f(lane[i], lane[i + half]);
    return lane[0];
}

inline float sum(Floats v) {
    return fold(v, [](float a, float b) { return a + b; });
}

inline float greatest(Floats v) {
    return fold(v, [](float a, float b) { return a > b ? a : b; });
}

// e^x to about 2 ulp within [-87, 88], clamped outside: e^-87 is negligible against the 1 of a softmax's greatest value.
template <typename V>
V exp(V x) {
    typedef int32_t Whole __attribute__((vector_size(sizeof(V))));
    x = min(max(x, -87.0f - V{}), 88.0f - V{});
    const V shift = 12582912.0f - V{};  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const V n = x * 1.44269504f + shift - shift;
    V r = x - n * 0.693145752f;  // ln 2 in two parts
    r = r - n * 1.42860677e-6f;
    V y = 1.9875691500e-4f - V{};
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (V)((__builtin_convertvector(n, Whole) + 127) << 23);
}

template <typename T>
Floats load(const T* p) {
    Floats v;
    for (int i = 0; i < kLanes; i++) v[i] = to_float(p[i]);
    return v;
}

template <typename T>
void store(T* p, Floats v) {
    for (int i = 0; i < kLanes; i++) from_float(v[i], &p[i]);
}

// Each float rounded to T.
template <typename T>
Floats rounded(Floats v) {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    T narrow[kLanes];
    store(narrow, v);
    return load(narrow);
}

}  // namespace drafttrain
