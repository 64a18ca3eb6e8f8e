// Devices of this machine, and Status.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "build_info.h"
#include "pantile/pantile.h"

namespace pantile::testing {
namespace {

TEST(QueryDevice, Cpu) {
  DeviceProps props;
  ASSERT_TRUE(query_device({}, &props).ok());
  EXPECT_EQ(props.device.type, DeviceType::cpu);
  EXPECT_GE(props.threads, 1);
  EXPECT_GT(std::strlen(props.name), 0u);
  EXPECT_STRNE(cpu_isa_name(props.isa), "?");
}

TEST(QueryDevice, ThreadsFollowTheSetting) {
  DeviceProps props;
  ASSERT_TRUE(query_device({}, &props).ok());
  const int usual = props.threads;
  set_cpu_threads(3);
  ASSERT_TRUE(query_device({}, &props).ok());
  EXPECT_EQ(props.threads, 3);
  set_cpu_threads(0);
  ASSERT_TRUE(query_device({}, &props).ok());
  EXPECT_EQ(props.threads, usual);
}

TEST(QueryDevice, BadDevices) {
  DeviceProps props;
  EXPECT_STREQ(query_device({DeviceType::cpu, 1}, &props).message(),
               "device.index is 1; the CPU has only device 0");
  EXPECT_STREQ(query_device({DeviceType::cuda, -1}, &props).message(),
               "device.index is -1; it must be 0 or more");
  EXPECT_STREQ(query_device({static_cast<DeviceType>(4), 0}, &props).message(),
               "device.type is 4; it must be cpu (0) or cuda (1)");
  EXPECT_STREQ(query_device({}, nullptr).message(), "props is null");
}

TEST(QueryDevice, CudaCountHasAReasonWhenItIsZero) {
  Status status;
  const int count = cuda_device_count(&status);
  EXPECT_EQ(count == 0, !status.ok());
  EXPECT_EQ(cuda_device_count(nullptr), count);
  DeviceProps props;
  EXPECT_FALSE(query_device({DeviceType::cuda, count}, &props).ok());
  if (!PANTILE_HAS_CUDA) {
    EXPECT_EQ(std::string(status.message()),
              std::string("this build has no CUDA kernels: ") + PANTILE_CUDA_REASON);
  }
}

TEST(StatusText, IsCutNotOverrun) {
  const std::string text(2000, 'x');
  const Status status = Status::error(StatusCode::unsupported, "%s", text.c_str());
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_EQ(std::strlen(status.message()), static_cast<std::size_t>(Status::kMessageCapacity) - 1);
  EXPECT_TRUE(Status().ok());
  EXPECT_STREQ(Status().message(), "");
}

}  // namespace
}  // namespace pantile::testing
