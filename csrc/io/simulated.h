// Reads as slow as those of a described device: an inner engine reads, and a read ends no earlier than it would have on
// that device (docs/DEVICES.md). Where the real device is slower, the real one is measured.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "io/device_model.h"
#include "pi2/read_engine.h"

namespace pi2 {

// `inner` makes the engine that reads. Returns null if it does, or if no thread can be started. `late`, if given (it
// must outlive the engine), counts reads that took longer than on the device.
std::unique_ptr<ReadEngine> simulated_engine(DeviceModel model,
                                             const std::function<std::unique_ptr<ReadEngine>(ReadDone)>& inner,
                                             ReadDone done, std::atomic<std::int64_t>* late = nullptr);

}  // namespace pi2
