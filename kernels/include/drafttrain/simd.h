// Sixteen floats at a time, in the compiler's own vector type: one source for AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#include "floats.h"

namespace drafttrain {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4)));

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof(v)); }

// Keeps a value in its register. Compilers would load it again for each product, and loads are the bottleneck.
inline void pin([[maybe_unused]] Floats& v) {
#ifdef __AVX512F__
    asm("" : "+v"(v));
#endif
}

inline Floats all(float x) { return x - Floats{}; }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

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
inline Floats exp(Floats x) {
    x = min(max(x, all(-87.0f)), all(88.0f));
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats n = x * 1.44269504f + shift - shift;
    Floats r = x - n * 0.693145752f;  // ln 2 in two parts
    r = r - n * 1.42860677e-6f;
    Floats y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
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
