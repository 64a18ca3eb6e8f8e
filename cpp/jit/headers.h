// The device headers, as text in the library (cmake/jit.cmake generates the definition).
#pragma once

namespace pantile::jit {

struct Header {
  const char* name;  // as it is included
  const char* text;
};

struct HeaderList {
  const Header* headers;
  int count;
  const char* hash;  // SHA-256 of all names and texts, hexadecimal
};

HeaderList embedded_headers();

}  // namespace pantile::jit
