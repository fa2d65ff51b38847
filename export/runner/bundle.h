// Opens a bundle's folder.
#pragma once

#include <filesystem>

#include "manifest.h"

namespace pi2::runner {

// Reads the manifest and checks the files of the folder against it. `store`, if not empty, replaces the folder's
// model.pi2. Throws Problem with the name of the file.
Manifest open_bundle(const std::filesystem::path& folder, const std::filesystem::path& store, Verify verify);

}  // namespace pi2::runner
