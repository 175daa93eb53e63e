// A CUDA device of host memory, for torch's CPU builds: tensors that say `cuda:1`, whose operators run on the CPU.
//
// Every operator for CUDA that has no kernel here falls to `on_host`: its tensors become CPU tensors over the same memory, the
// CPU's kernel runs, and what it gives is a tensor of the device again. As on a GPU, an operator refuses tensors of two
// devices. Memory is refused to a process that has not called set_device, and on any other device than the one it has named
// there.

#undef TORCH_TARGET_VERSION  // the operators' build sets it; this file needs what it hides

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;

int devices = 0;  // how many there are
int bound = -1;   // the one that the process has chosen; -1: none yet
thread_local int current = 0;

Device on(int index) { return Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)); }

void check_memory(int index, const char* what) {
    TORCH_CHECK(bound >= 0, "stand-in: ", what, " on cuda:", index, " before set_device");
    TORCH_CHECK(index == bound, "stand-in: ", what, " on cuda:", index, " by the process of cuda:", bound);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device d) const override {
        Device old = on(current);
        setDevice(d);
        return old;
    }
    Device getDevice() const override { return on(current); }
    void setDevice(Device d) const override {
        TORCH_CHECK(d.index() < devices, "stand-in: invalid device ordinal ", int(d.index()));
        current = d.index();
    }
    void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
    c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
    c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
    c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
    c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        check_memory(current, "memory");
        void* data = std::malloc(bytes ? bytes : 1);
        return {data, data, &std::free, on(current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory memory;

// What the rest of torch asks CUDA. Pinning opens a context on the current device, as a kernel does.
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex index) const override { return index == bound; }
    c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
    void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
    c10::Allocator* getPinnedMemoryAllocator() const override {
        check_memory(current, "pinned memory");
        return at::getCPUAllocator();
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
    void deviceSynchronize(c10::DeviceIndex) const override {}
};

Tensor host(const Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
    return at::for_blob(x.mutable_data_ptr(), x.sizes())
        .strides(x.strides())
        .deleter([x](void*) {})
        .options(options)
        .make_tensor();
}

// A tensor of the device over the memory of `x`.
Tensor device_tensor(const Tensor& x, Device d) {
    auto* kept = new Tensor(x);
    c10::DataPtr data(x.storage().mutable_data(), kept, [](void* p) { delete static_cast<Tensor*>(p); }, d);
    c10::Storage storage(c10::Storage::use_byte_size_t(), x.storage().nbytes(), std::move(data), &memory, true);
    Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), x.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    return made;
}

// What an operator was called with, and what its tensors became.
struct Call {
    std::vector<std::pair<Tensor, Tensor>> pairs;  // the device's, the host's
    std::optional<Device> device;
    bool mixed = false;  // a tensor of the host with dimensions among them

    Tensor in(const Tensor& x, bool whole) {
        if (!x.defined()) return x;
        if (!x.is_cuda()) {
            mixed |= x.dim() > 0;
            return x;
        }
        TORCH_CHECK(!device || *device == x.device(), "stand-in: tensors on ", device ? device->str() : "", " and ",
                    x.device().str());
        device = x.device();
        Tensor made = whole && x.numel() == 0 ? at::empty({0}, x.options().device(at::kCPU)).resize_(x.sizes()) : host(x);
        pairs.emplace_back(x, made);
        return made;
    }

    Tensor out(const Tensor& made) {
        if (!made.defined() || !made.is_cpu() || !device) return made;
        for (auto& [ours, theirs] : pairs) {
            if (theirs.is_same(made)) {
                adopt(ours, theirs);
                return ours;
            }
        }
        for (auto& [ours, theirs] : pairs)
            if (theirs.numel() && made.numel() && theirs.storage().data() == made.storage().data())
                return at::native::as_strided_tensorimpl(
                    ours, made.sizes(), made.strides(),
                    ours.storage_offset() + made.storage_offset() - theirs.storage_offset());
        return device_tensor(made, *device);
    }

    // An output that the operator has given another size.
    static void adopt(const Tensor& ours, const Tensor& theirs) {
        if (ours.sizes() == theirs.sizes() && ours.numel()) return;
        auto* to = ours.unsafeGetTensorImpl();
        if (theirs.numel()) {
            Tensor made = device_tensor(theirs, ours.device());
            to->set_storage_keep_dtype(made.storage());
        }
        to->set_sizes_and_strides(theirs.sizes(), theirs.strides());
    }
};

const std::unordered_set<std::string> TWO_DEVICES = {"aten::copy_", "aten::_copy_from",       "aten::_copy_from_and_resize",
                                                     "aten::index", "aten::_index_put_impl_", "aten::index_put_"};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto& schema = op.schema();
    size_t count = schema.arguments().size(), first = stack->size() - count;
    Call call;
    std::optional<Device> asked;
    for (size_t i = 0; i < count; ++i) {
        auto& value = (*stack)[first + i];
        const auto* alias = schema.arguments()[i].alias_info();
        bool written = alias && alias->isWrite();
        if (value.isTensor()) {
            value = call.in(value.toTensor(), written);
        } else if (value.isTensorList()) {
            c10::List<Tensor> found;
            for (const Tensor& x : value.toTensorVector()) found.push_back(call.in(x, false));
            value = found;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> found;
            for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
                found.push_back(x ? std::optional<Tensor>(call.in(*x, false)) : std::nullopt);
            value = found;
        } else if (value.isDevice() && value.toDevice().is_cuda()) {
            asked = value.toDevice().has_index() ? value.toDevice() : on(current);
            check_memory(asked->index(), schema.name().c_str());
            value = c10::IValue(Device(at::kCPU));
        }
    }
    if (asked) call.device = asked;
    TORCH_CHECK(!call.mixed || TWO_DEVICES.count(schema.name()), "stand-in: ", schema.name(),
                ": expected all tensors to be on the same device, got one on cpu and one on ",
                call.device ? call.device->str() : "cuda");
    op.callBoxed(stack);
    size_t results = schema.returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); ++i) {
        auto& value = (*stack)[i];
        if (value.isTensor()) {
            value = call.out(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<Tensor> found;
            for (const Tensor& x : value.toTensorVector()) found.push_back(call.out(x));
            value = found;
        }
    }
}

c10::Device placed(std::optional<Device> device) { return device && device->has_index() ? *device : on(current); }

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(placed(device));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
                                     format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(placed(device));
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& x, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    at::IntArrayRef strides = stride;
    std::vector<int64_t> dense;
    if (stride.data() == nullptr) {
        dense.assign(size.size(), 1);
        for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i)
            dense[i] = dense[i + 1] * std::max<int64_t>(size[i + 1], 1);
        strides = dense;
    }
    x.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
    return x;
}

Tensor& set_whole_storage(Tensor& x, c10::Storage storage) {
    int64_t size = static_cast<int64_t>(storage.nbytes() / x.dtype().itemsize());
    return set_storage(x, std::move(storage), 0, {size}, {1});
}

Tensor& set_empty(Tensor& x) {
    c10::DeviceGuard guard(x.device());
    return set_storage(x, c10::Storage(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true), 0, {0}, {1});
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_host>());
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("unfold", TORCH_FN(at::native::unfold));
    m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
    m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
    m.impl("resize_", TORCH_FN(at::native::resize_));
    m.impl("set_.source_Storage", &set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
    m.impl("set_", &set_empty);
    m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY(drafttrain_standin, m) {
    m.def("host(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &host));
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name

}  // namespace

extern "C" {
void standin_open(int count) { devices = count; }
int standin_current() { return current; }
int standin_bound() { return bound; }
void standin_set(int index) { current = bound = index; }  // the caller's choice, once and for all
void standin_exchange(int index) { current = index; }     // for the time of a guard
}
