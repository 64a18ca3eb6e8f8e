// SHA-256, keys, and the text of a kernel's file.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "jit/compile.h"
#include "jit/headers.h"
#include "jit/image.h"
#include "jit/sha256.h"
#include "support.h"

namespace pantile::jit {
namespace {

std::string hash_of(const std::string& text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex();
}

// FIPS 180-4, examples of NIST.
TEST(Sha256, GivesThePublishedValues) {
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnThePieces) {
  std::string text;
  for (int i = 0; i < 300; ++i) {
    text += static_cast<char>(7 * i);
  }
  for (std::size_t piece = 1; piece < 150; ++piece) {
    Sha256 hash;
    for (std::size_t at = 0; at < text.size(); at += piece) {
      hash.update(text.substr(at, piece));
    }
    EXPECT_EQ(hash.hex(), hash_of(text)) << piece;
  }
}

TEST(Image, IsReadAsItWasWritten) {
  const Image image = image_of("source");
  Image read;
  ASSERT_TRUE(decode(encode(image), &read));
  EXPECT_EQ(read.key, image.key);
  EXPECT_EQ(read.name, image.name);
  EXPECT_EQ(read.compiler, image.compiler);
  EXPECT_EQ(read.symbol, image.symbol);
  EXPECT_EQ(read.registers, image.registers);
  EXPECT_EQ(read.spill_bytes, image.spill_bytes);
  EXPECT_EQ(read.shared_bytes, image.shared_bytes);
  EXPECT_EQ(read.advisories, image.advisories);
  EXPECT_EQ(read.code, image.code);
}

TEST(Image, EmptyFieldsAndNamesOfTwoLines) {
  Image image = image_of("source");
  image.advisories = "";
  image.name = "two\nlines";
  Image read;
  ASSERT_TRUE(decode(encode(image), &read));
  EXPECT_EQ(read.advisories, "");
  EXPECT_EQ(read.name, "two lines");
}

TEST(Image, EveryDamageIsSeen) {
  const std::string text = encode(image_of("source"));
  Image read;
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_FALSE(decode(damaged, &read)) << "byte " << i;
    EXPECT_FALSE(decode(text.substr(0, i), &read)) << "length " << i;
  }
  EXPECT_FALSE(decode(text + "x", &read));
  EXPECT_TRUE(read.key.empty());  // nothing of a damaged file is taken
}

TEST(ImageKey, NamesEverythingThatDecidesTheCode) {
  const Request request{"name", "source", "entry", 90};
  std::set<std::string> keys = {image_key(request)};
  for (Request other :
       {Request{"name", "ource", "entrys", 90}, Request{"name", "other", "entry", 90},
        Request{"name", "source", "other", 90}, Request{"name", "source", "entry", 80}}) {
    keys.insert(image_key(other));
  }
  EXPECT_EQ(keys.size(), 5u);
  EXPECT_EQ(image_key(request), image_key(Request{"another name", "source", "entry", 90}));
  EXPECT_EQ(image_key(request).size(), 64u);
}

TEST(Headers, HoldTheKernelsAndWhatTheyInclude) {
  const HeaderList list = embedded_headers();
  std::set<std::string> names;
  std::string everything;
  for (int i = 0; i < list.count; ++i) {
    EXPECT_TRUE(names.insert(list.headers[i].name).second) << list.headers[i].name;
    EXPECT_GT(std::string(list.headers[i].text).size(), 0u) << list.headers[i].name;
    everything += std::string(list.headers[i].name) + "\n" + list.headers[i].text + "\n";
  }
  for (const char* name : {"hopper/forward/kernel.cuh", "hopper/backward/kernel_paired.cuh",
                           "ampere/forward/kernel.cuh", "ampere/backward/kernel.cuh",
                           "core/softmax_state.h", "cstdint", "build_options.h"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
  EXPECT_EQ(names.count("driver.h"), 0u);  // host code
  EXPECT_EQ(hash_of(everything), list.hash);
}

TEST(CompileOptions, NameTheArchitecture) {
  EXPECT_EQ(compile_options(90)[0], "--gpu-architecture=sm_90a");
  EXPECT_EQ(compile_options(80)[0], "--gpu-architecture=sm_80");
}

}  // namespace
}  // namespace pantile::jit
