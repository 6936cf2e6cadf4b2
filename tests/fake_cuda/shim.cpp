// A CUDA device for the CPU build of torch, as far as autograd and the dispatcher ask for one.
//
// Streams and events are numbers. Each thread has a current stream; every wait that torch itself inserts (autograd does
// where a gradient crosses streams) is reported to the Python side, which keeps the clocks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Record = int64_t (*)(int64_t stream);
using Block = void (*)(int64_t event, int64_t stream);
using Use = void (*)(int64_t storage, int64_t stream);

Record on_record = nullptr;
Block on_block = nullptr;
Use on_use = nullptr;
int64_t devices = 1;
thread_local int64_t stream_here = 0;
thread_local int64_t device_here = 0;

// The storage that a pointer is a member of: fake tensors have no address to tell them apart.
int64_t storage_of(const c10::DataPtr& pointer) {
  static const ptrdiff_t offset = [] {
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
    return reinterpret_cast<const char*>(&storage->data_ptr()) - reinterpret_cast<const char*>(storage.get());
  }();
  return reinterpret_cast<int64_t>(reinterpret_cast<const char*>(&pointer) - offset);
}

c10::Device device(int64_t index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = device(device_here);
    if (to.has_index()) device_here = to.index();
    return before;
  }
  c10::Device getDevice() const override { return device(device_here); }
  void setDevice(c10::Device to) const override { device_here = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device_here = to.index(); }
  c10::Stream getStream(c10::Device of) const override { return c10::Stream(c10::Stream::UNSAFE, named(of), stream_here); }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, named(of)); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    c10::Stream before(c10::Stream::UNSAFE, to.device(), stream_here);
    stream_here = to.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(on_record ? on_record(stream.id()) : 1);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && on_block) on_block(reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (on_use) on_use(storage_of(pointer), stream.id());
  }

 private:
  static c10::Device named(c10::Device of) { return of.has_index() ? of : device(device_here); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return static_cast<at::DeviceIndex>(devices); }
  at::DeviceIndex getCurrentDevice() const override { return static_cast<at::DeviceIndex>(device_here); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {
using CUDAHooks = ::Hooks;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

extern "C" {
int64_t fake_cuda_stream() { return stream_here; }
void fake_cuda_set_stream(int64_t stream) { stream_here = stream; }
int64_t fake_cuda_device() { return device_here; }
void fake_cuda_set_device(int64_t index) { device_here = index; }
void fake_cuda_connect(Record record, Block block, Use use, int64_t count) {
  on_record = record;
  on_block = block;
  on_use = use;
  devices = count;
}
}
