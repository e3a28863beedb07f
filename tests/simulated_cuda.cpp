// What torch's C++ asks of CUDA where autograd and streams are concerned, for tests/simulated_cuda.py: one device,
// streams that are numbers, and events that Python is told of.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Registry.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

// DDP's timer, of which only the table of functions counts; torch's header takes long to compile.
namespace c10d {
struct Timer {
  virtual void record(uint8_t) = 0;
  virtual std::optional<int64_t> measureDifference(uint8_t, uint8_t) = 0;
  virtual ~Timer() = default;
};
c10::Registry<c10::DeviceType, std::unique_ptr<Timer>, c10::Device>* TimerRegistry();
}  // namespace c10d

namespace {

using namespace c10;

DeviceIndex device = 0;
thread_local StreamId current = 0;
std::atomic<StreamId> streams{0};
std::atomic<intptr_t> events{0};
const StreamId host = -2;  // in place of a stream that waits
void (*recorded)(intptr_t event, int64_t stream) = nullptr;
void (*waited)(intptr_t event, int64_t stream) = nullptr;

Stream stream(StreamId id) { return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), id); }

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, device); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return device + 1; }
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(++streams); }
  Stream getNewStream(Device, int) const override { return stream(++streams); }
  Stream exchangeStream(Stream to) const override {
    Stream before = stream(current);
    current = to.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++events);
    if (recorded) recorded(reinterpret_cast<intptr_t>(*event), on.id());
  }
  void block(void* event, const Stream& waiting) const override {
    if (waited) waited(reinterpret_cast<intptr_t>(event), waiting.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (waited) waited(reinterpret_cast<intptr_t>(event), host);
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device + 1; }
  DeviceIndex getCurrentDevice() const override { return device; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

extern "C" {

void begin(int own, void (*record)(intptr_t, int64_t), void (*wait)(intptr_t, int64_t)) {
  device = own;
  recorded = record;
  waited = wait;
  // torch has asked for its hooks and keeps them. They are objects without data: the table of their functions is all
  // that has to change.
  static Hooks hooks;
  c10d::TimerRegistry()->Register(
      DeviceType::CUDA, [](Device own) { return c10d::TimerRegistry()->Create(DeviceType::CPU, own); });
  std::memcpy((void*)&at::detail::getCUDAHooks(), (void*)&hooks, sizeof(void*));
}

int64_t current_stream() { return current; }

int64_t exchange_stream(int64_t to) {
  int64_t before = current;
  current = to;
  return before;
}

}
