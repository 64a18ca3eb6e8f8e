// A compiled kernel as bytes: machine code, and what is known of it. Its file is a text head and
// the code:
//
//   pantile kernel 1
//   sha256 <of everything after this line>
//   key <hexadecimal>
//   ...                     one field a line, in the order of Image
//   bytes <of the code>
//   <code>
#pragma once

#include <string>

#include "jit/kernel.h"

namespace pantile::jit {

struct Image {
  std::string key;       // image_key() of its request
  std::string name;      // of its request
  std::string compiler;  // "nvrtc 13.0"
  std::string symbol;    // of the kernel in the code
  int registers = 0;
  int spill_bytes = 0;
  int shared_bytes = 0;
  std::string advisories;
  std::string code;  // a cubin
};

// What decides the machine code, except the compiler's version: the version of pantile, the device
// headers, source, entry, architecture and options. SHA-256, hexadecimal.
std::string image_key(const Request& request);

std::string encode(const Image& image);

// False when the text is not what encode() made, whole.
bool decode(const std::string& text, Image* image);

}  // namespace pantile::jit
