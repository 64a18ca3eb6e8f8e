// Finding NVRTC, and compiling with one that pretends (fake_nvrtc.cc). The real one is put to the
// kernels by tools/check_nvrtc.py.
#include <gtest/gtest.h>

#include "jit/compile.h"
#include "jit/nvrtc.h"
#include "support.h"

namespace pantile::jit {
namespace {

class FindNvrtc : public JitTest {
 protected:
  // A folder with a fake under the name that the loader would know.
  std::string with_fake(const std::string& name, const char* fake, const char* library) {
    const std::string made = in_folder(name);
    std::filesystem::create_directories(made);
    std::filesystem::copy_file(fake, made + "/" + library);
    return made;
  }
  Status open(const Settings& settings, int driver = 0) {
    found_ = Nvrtc();
    return open_nvrtc(settings, driver, &found_);
  }
  Settings folders(std::vector<std::string> all) const {
    Settings settings;
    settings.nvrtc_folders = std::move(all);
    return settings;
  }
  Settings exactly(const std::string& path) const {
    Settings settings;
    settings.nvrtc = path;
    return settings;
  }

  Nvrtc found_;
};

TEST_F(FindNvrtc, InAFolderThatWasGiven) {
  const std::string there = with_fake("new", FAKE_NVRTC_13_0, "libnvrtc.so.13");
  const Status status = open(folders({in_folder("missing"), there}));
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(found_.version, 1300);
  EXPECT_EQ(found_.version_text(), "13.0");
  EXPECT_TRUE(contains(found_.path, there)) << found_.path;
}

TEST_F(FindNvrtc, PassesOverWhatIsTooOldOrTooNew) {
  const std::string older = with_fake("old", FAKE_NVRTC_12_8, "libnvrtc.so.12");
  const std::string newer = with_fake("newer", FAKE_NVRTC_14_1, "libnvrtc.so.14");
  const std::string good = with_fake("new", FAKE_NVRTC_13_0, "libnvrtc.so.13");
  ASSERT_TRUE(open(folders({older, newer, good}), 1300).ok());
  EXPECT_EQ(found_.version, 1300);
  ASSERT_TRUE(open(folders({older, newer, good})).ok());  // no driver: for another machine
  EXPECT_EQ(found_.version, 1401);
}

TEST_F(FindNvrtc, TheEnvironmentVariableStandsAlone) {
  const std::string older = with_fake("old", FAKE_NVRTC_12_8, "libnvrtc.so.12");
  const std::string good = with_fake("new", FAKE_NVRTC_13_0, "libnvrtc.so.13");
  ASSERT_TRUE(open(exactly(good)).ok());
  ASSERT_TRUE(open(exactly(good + "/libnvrtc.so.13")).ok());
  Settings settings = exactly(older);
  settings.nvrtc_folders = {good};
  const Status status = open(settings);
  EXPECT_EQ(status.code(), StatusCode::unavailable);
  EXPECT_TRUE(contains(status.message(), "PANTILE_NVRTC=" + older)) << status.message();
  EXPECT_TRUE(contains(status.message(), "NVRTC 12.8 is older than 12.9")) << status.message();
}

TEST_F(FindNvrtc, SaysWhatIsWrongAndWhatToInstall) {
  const std::string newer = with_fake("newer", FAKE_NVRTC_14_1, "libnvrtc.so.14");
  Status status = open(exactly(newer + "/libnvrtc.so.14"), 1208);
  EXPECT_TRUE(
      contains(status.message(), "NVRTC 14.1 is newer than the driver, which knows CUDA 12.8"))
      << status.message();
  EXPECT_TRUE(contains(status.message(), "pip install 'nvidia-cuda-nvrtc-cu12>=12.9'"))
      << status.message();
  status = open(exactly(in_folder("missing.so")), 1300);
  EXPECT_EQ(status.code(), StatusCode::unavailable);
  EXPECT_TRUE(contains(status.message(), "missing.so")) << status.message();
  EXPECT_TRUE(contains(status.message(), "pip install 'nvidia-cuda-nvrtc<14'")) << status.message();
  write_text(in_folder("text.so"), "no library");
  EXPECT_TRUE(contains(open(exactly(in_folder("text.so"))).message(), "text.so"));
  EXPECT_TRUE(contains(open(exactly(FAKE_NOTHING)).message(), "it lacks functions of NVRTC"));
}

class CompileTest : public FindNvrtc {
 protected:
  void SetUp() override {
    FindNvrtc::SetUp();
    ASSERT_TRUE(open(exactly(FAKE_NVRTC_13_0)).ok());
  }
  Image image_;
};

TEST_F(CompileTest, GivesCodeAndFacts) {
  const Request request = request_of("source");
  ASSERT_TRUE(compile(found_, request, &image_).ok());
  EXPECT_EQ(image_.code, "code of source");
  EXPECT_EQ(image_.symbol, "lowered_entry");
  EXPECT_EQ(image_.key, image_key(request));
  EXPECT_EQ(image_.compiler, "nvrtc 13.0");
  EXPECT_EQ(image_.registers, 168);
  EXPECT_EQ(image_.shared_bytes, 48);
  EXPECT_EQ(image_.spill_bytes, 0);
  EXPECT_EQ(image_.advisories, "");
  EXPECT_TRUE(Messages::get().warnings.empty());
}

TEST_F(CompileTest, ANameMayHaveLines) {
  Request request = request_of("source");
  request.entry = "kernel<1,\n  2>";
  ASSERT_TRUE(compile(found_, request, &image_).ok());
  EXPECT_EQ(image_.symbol, "lowered_kernel<1,   2>");
}

TEST_F(CompileTest, WarnsOfSpillsAndAdvisories) {
  ASSERT_TRUE(compile(found_, request_of("spills many, serialised"), &image_).ok());
  EXPECT_EQ(image_.spill_bytes, 200);
  EXPECT_EQ(image_.advisories, "C7515,C7510");
  ASSERT_EQ(Messages::get().warnings.size(), 1u);
  const std::string& warning = Messages::get().warnings[0];
  EXPECT_TRUE(contains(warning, "kernel of spills many, serialised")) << warning;
  EXPECT_TRUE(contains(warning, "200 bytes")) << warning;
  EXPECT_TRUE(contains(warning, "C7515,C7510")) << warning;
}

TEST_F(CompileTest, AFewSpillsAreRecordedOnly) {
  ASSERT_TRUE(compile(found_, request_of("spills"), &image_).ok());
  EXPECT_EQ(image_.spill_bytes, 12);
  EXPECT_TRUE(Messages::get().warnings.empty());
}

TEST_F(CompileTest, ErrorsOfTheSourceAreTold) {
  const Status status = compile(found_, request_of("broken"), &image_);
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(contains(status.message(), "kernel.cu(1): error: this source is broken"))
      << status.message();
  ASSERT_EQ(Messages::get().warnings.size(), 1u);
  EXPECT_TRUE(contains(Messages::get().warnings[0], "  here"));  // the log is whole
  EXPECT_TRUE(image_.code.empty());
}

TEST_F(CompileTest, RequestsAreChecked) {
  for (const Request& request :
       {Request{"n", "", "entry", 90}, Request{"n", "source", "", 90},
        Request{"n", "source", "entry", 75}, Request{"n", "source", "entry", 0}}) {
    EXPECT_EQ(compile(found_, request, &image_).code(), StatusCode::invalid_argument);
  }
}

TEST_F(CompileTest, WritesAFolderThatServesWithoutACompiler) {
  setenv("PANTILE_NVRTC", FAKE_NVRTC_13_0, 1);
  KernelFacts facts;
  const KernelSource source{"name", "spills", "entry", 90};
  const Status status = compile_to_folder(source, in_folder("shipped").c_str(), &facts);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(facts.registers, 168);
  EXPECT_EQ(facts.spill_bytes, 12);
  EXPECT_EQ(facts.bytes, 14);
  Image image;
  ASSERT_TRUE(decode(read_text(facts.file), &image));
  EXPECT_EQ(image.code, "code of spills");
  EXPECT_EQ(image.key, image_key(Request{"name", "spills", "entry", 90}));
}

TEST_F(CompileTest, WritingToAFolderChecksItsArguments) {
  KernelFacts facts;
  const KernelSource good{"name", "source", "entry", 90};
  EXPECT_TRUE(contains(compile_to_folder(good, "", &facts).message(), "folder is empty"));
  EXPECT_TRUE(contains(compile_to_folder(good, "x", nullptr).message(), "facts is null"));
  KernelSource bad = good;
  bad.entry = nullptr;
  EXPECT_TRUE(contains(compile_to_folder(bad, "x", &facts).message(), "source.entry is null"));
}

}  // namespace
}  // namespace pantile::jit
