// Folders of compiled kernels: a file for each key, "<key>.kernel". No locks and no times: a file
// is written under a private name and renamed, so that a reader finds a whole file or none, and a
// process that finds none compiles for itself.
#pragma once

#include <string>

#include "jit/image.h"
#include "pantile/status.h"

namespace pantile::jit {

enum class Found { image, nothing, broken, refused };

// `refused`: the folder or the file belongs to somebody else or everybody may write to it; its
// machine code is not loaded. `why` says what is wrong when the answer is broken or refused.
Found read_image(const std::string& folder, const std::string& key, Image* image, std::string* why);

// Makes the folder if need be, for its owner alone.
Status write_image(const std::string& folder, const Image& image, std::string* path);

std::string image_path(const std::string& folder, const std::string& key);

}  // namespace pantile::jit
