// Reads as slow as those of a described device: another engine reads, and a read is told of no earlier than the device
// would have been done with it (docs/DEVICES.md). Where the real one is slower, it is the real one that is measured.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "io/device_model.h"
#include "pi2/read_engine.h"

namespace pi2 {

// `inner` makes the engine that reads; null if it returns null, or if no thread can be started. `late`, if there is one
// (it must live longer), counts reads that were over later than the device's.
std::unique_ptr<ReadEngine> simulated_engine(DeviceModel model,
                                             const std::function<std::unique_ptr<ReadEngine>(ReadDone)>& inner,
                                             ReadDone done, std::atomic<std::int64_t>* late = nullptr);

}  // namespace pi2
