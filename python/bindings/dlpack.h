// The part of DLPack 1.x that a consumer of the C exchange table needs. Names and layout are the
// standard's; a framework publishes the table as the type attribute __dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace pantile::python::dlpack {

// DLDeviceType and DLDataTypeCode values that are read here.
enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
};

struct Version {
  std::uint32_t major, minor;
};

struct Device {
  std::int32_t type, index;
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct Header {
  Version version;
  Header* previous;
};

struct ExchangeTable {
  Header header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Borrowed: nothing is allocated and no reference is taken, so the answer dies with the object.
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_index, void** out);
};

inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

// The newest table of major version 1 in the chain, or null.
inline const ExchangeTable* usable_table(const void* published) {
  const auto* header = static_cast<const Header*>(published);
  while (header != nullptr && header->version.major > 1) {
    header = header->previous;
  }
  if (header == nullptr || header->version.major != 1) {
    return nullptr;
  }
  const auto* table = reinterpret_cast<const ExchangeTable*>(header);
  const bool complete =
      table->tensor_from_object != nullptr && table->current_work_stream != nullptr;
  return complete ? table : nullptr;
}

}  // namespace pantile::python::dlpack
