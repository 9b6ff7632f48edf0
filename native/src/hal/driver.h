// The devices that one API offers on this machine.
#pragma once

#include "hal/device.h"

namespace lapilli::hal {

class Driver {
public:
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Best first: discrete, integrated, virtual, other, CPU; otherwise in the driver's order.
  virtual uint32_t count() const = 0;
  virtual const Capabilities& capabilities(uint32_t index) const = 0;
  // Opens the device, or returns the one that is open already and has not been lost.
  virtual std::shared_ptr<Device> open(uint32_t index) = 0;

  // By index, part of a name, or UUID; null: the environment variable LAPILLI_DEVICE; empty: the best one. Throws NO_DEVICE.
  uint32_t select(const char* wanted) const;

protected:
  Driver() = default;
};

} // namespace lapilli::hal
