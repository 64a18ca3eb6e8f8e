#include "jit/image.h"

#include <cstdlib>

#include "jit/compile.h"
#include "jit/headers.h"
#include "jit/sha256.h"
#include "pantile/version.h"

namespace pantile::jit {
namespace {

constexpr char kMagic[] = "pantile kernel 1\n";

// "label value\n" from `at` on; moves `at` behind it.
bool take(const std::string& text, const char* label, std::size_t* at, std::string* value) {
  const std::string begin = std::string(label) + " ";
  if (text.compare(*at, begin.size(), begin) != 0) {
    return false;
  }
  const std::size_t end = text.find('\n', *at);
  if (end == std::string::npos) {
    return false;
  }
  *value = text.substr(*at + begin.size(), end - *at - begin.size());
  *at = end + 1;
  return true;
}

bool take(const std::string& text, const char* label, std::size_t* at, int* value) {
  std::string digits;
  if (!take(text, label, at, &digits) || digits.empty() || digits.size() > 9 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    return false;
  }
  *value = std::atoi(digits.c_str());
  return true;
}

}  // namespace

std::string image_key(const Request& request) {
  Sha256 hash;
  // Each part with its length: no two requests give the same bytes.
  const auto add = [&hash](const std::string& part) {
    hash.update(std::to_string(part.size()) + ":" + part);
  };
  add("pantile " + std::to_string(PANTILE_VERSION_MAJOR) + "." +
      std::to_string(PANTILE_VERSION_MINOR) + "." + std::to_string(PANTILE_VERSION_PATCH));
  add(embedded_headers().hash);
  for (const std::string& option : compile_options(request.arch)) {
    add(option);
  }
  add(request.entry);
  add(request.source);
  return hash.hex();
}

std::string encode(const Image& image) {
  std::string body;
  const auto field = [&body](const char* label, const std::string& value) {
    body += std::string(label) + " " + one_line(value) + "\n";
  };
  field("key", image.key);
  field("name", image.name);
  field("compiler", image.compiler);
  field("symbol", image.symbol);
  field("registers", std::to_string(image.registers));
  field("spill_bytes", std::to_string(image.spill_bytes));
  field("shared_bytes", std::to_string(image.shared_bytes));
  field("advisories", image.advisories);
  field("bytes", std::to_string(image.code.size()));
  body += image.code;
  Sha256 hash;
  hash.update(body);
  return kMagic + ("sha256 " + hash.hex() + "\n") + body;
}

bool decode(const std::string& text, Image* image) {
  const std::string magic = kMagic;
  std::size_t at = magic.size();
  std::string hash;
  if (text.compare(0, magic.size(), magic) != 0 || !take(text, "sha256", &at, &hash)) {
    return false;
  }
  Sha256 found;
  found.update(text.data() + at, text.size() - at);
  if (found.hex() != hash) {
    return false;
  }
  int bytes = 0;
  Image read;
  const bool whole =
      take(text, "key", &at, &read.key) && take(text, "name", &at, &read.name) &&
      take(text, "compiler", &at, &read.compiler) && take(text, "symbol", &at, &read.symbol) &&
      take(text, "registers", &at, &read.registers) &&
      take(text, "spill_bytes", &at, &read.spill_bytes) &&
      take(text, "shared_bytes", &at, &read.shared_bytes) &&
      take(text, "advisories", &at, &read.advisories) && take(text, "bytes", &at, &bytes) &&
      text.size() - at == static_cast<std::size_t>(bytes);
  if (whole) {
    read.code = text.substr(at);
    *image = read;
  }
  return whole;
}

}  // namespace pantile::jit
