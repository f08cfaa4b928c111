// What autograd asks of a CUDA device before it runs a backward pass: a guard with streams and events that do nothing,
// and hooks which say that CUDA is there and that no device has a context. With it the tensors of FakeTensorMode, which
// have no data, go through whole training steps on a machine without a GPU.
//
// The hooks are a C++ object that torch keeps for itself. Two entries of its virtual table are replaced in a copy.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstddef>
#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

bool no_context(void*, DeviceIndex) { return false; }
bool yes(void*) { return true; }

// The place of a virtual function in the table (Itanium ABI: 1 + 8 times the place).
template <class Function>
std::size_t place(Function function) {
  union {
    Function function;
    std::ptrdiff_t words[2];
  } as{function};
  return (as.words[0] - 1) / sizeof(void*);
}

}  // namespace

extern "C" void install_fake_cuda() {
  constexpr std::size_t before = 2, entries = 256;  // of a virtual table; more entries than the hooks have
  static void* table[before + entries];
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(DeviceType::CUDA)].store(&guard);
  void*** hooks = reinterpret_cast<void***>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  std::memcpy(table, *hooks - before, sizeof table);
  table[before + place(&at::CUDAHooksInterface::hasPrimaryContext)] = reinterpret_cast<void*>(no_context);
  table[before + place(&at::CUDAHooksInterface::hasCUDA)] = reinterpret_cast<void*>(yes);
  *hooks = table + before;
}
