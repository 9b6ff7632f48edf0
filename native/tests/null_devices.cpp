// In place of api/devices.cpp: the C ABI on a device of the host's memory, without a driver.

#include "api/devices.h"
#include "null.h"

namespace lapilli {

namespace {

class NullDriver final : public hal::Driver {
public:
  uint32_t count() const override { return 1; }
  const hal::Capabilities& capabilities(uint32_t) const override { return device_->capabilities; }
  std::shared_ptr<hal::Device> open(uint32_t) override { return device_; }

private:
  const std::shared_ptr<null::Device> device_ = null_device();
};

NullDriver& driver() {
  static NullDriver one;
  return one;
}

} // namespace

hal::Driver* find_driver() { return &driver(); }

std::shared_ptr<hal::Device> open_device(const lapilli_load_options& options) {
  return driver().open(driver().select(options.device));
}

} // namespace lapilli
