// A bundle's folder.
#pragma once

#include <filesystem>

#include "manifest.h"

namespace pi2::runner {

// Reads the manifest and compares the files of the folder with it; `store`, if not empty, is looked at instead of the
// folder's model.pi2. Throws Problem, which names the file.
Manifest open_bundle(const std::filesystem::path& folder, const std::filesystem::path& store, Verify verify);

}  // namespace pi2::runner
