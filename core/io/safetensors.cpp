// SPDX-License-Identifier: Apache-2.0
#include "core/io/safetensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own reader

struct DTypeName {
  std::string_view name;
  DType dtype;
};
// BOOL last: it reads as U8 and is never written.
constexpr std::array kDTypeNames = {DTypeName{"F64", DType::f64},   DTypeName{"F32", DType::f32}, DTypeName{"F16", DType::f16},
                                    DTypeName{"BF16", DType::bf16}, DTypeName{"I64", DType::i64}, DTypeName{"I32", DType::i32},
                                    DTypeName{"I16", DType::i16},   DTypeName{"I8", DType::i8},   DTypeName{"U16", DType::u16},
                                    DTypeName{"U8", DType::u8},     DTypeName{"BOOL", DType::u8}};

std::optional<DType> dtype_named(std::string_view name) {
  const auto* found = std::find_if(kDTypeNames.begin(), kDTypeNames.end(), [&](const DTypeName& d) { return d.name == name; });
  return found == kDTypeNames.end() ? std::nullopt : std::optional(found->dtype);
}

std::string_view format_name(DType dtype) {
  return std::find_if(kDTypeNames.begin(), kDTypeNames.end(), [&](const DTypeName& d) { return d.dtype == dtype; })->name;
}

/// Turns the bytes of one file into checked entries; holds the path for messages.
class HeaderReader {
 public:
  explicit HeaderReader(const MappedFile& file) : path_(file.path().string()), bytes_(file.bytes()) {}

  void read(std::vector<SafetensorsEntry>& entries, SafetensorsMetadata& metadata, std::span<const std::byte>& data) const {
    const std::string_view header = header_text();
    data = bytes_.subspan(kLengthBytes + header.size());
    const json parsed = parse(header);
    for (const auto& [key, value] : parsed.items()) {
      if (key == kMetadataKey) {
        metadata = metadata_from(value);
      } else {
        entries.push_back(entry_from(key, value));
      }
    }
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin_bytes, a.end_bytes, a.name) < std::tie(b.begin_bytes, b.end_bytes, b.name);
    });
    check_coverage(entries, static_cast<std::int64_t>(data.size()));
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{} is not a valid safetensors file: {}", path_, what));
  }

  [[nodiscard]] std::string_view header_text() const {
    if (bytes_.size() < kLengthBytes) refuse(fmt::format("{} bytes, the header length alone takes 8", bytes_.size()));
    std::uint64_t length = 0;
    for (std::size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(bytes_[i]);
    if (length > kMaxHeaderBytes) refuse(fmt::format("header length {} is above the limit of {}", length, kMaxHeaderBytes));
    if (length > bytes_.size() - kLengthBytes) {
      refuse(fmt::format("header length {} reaches beyond the file of {} bytes: truncated?", length, bytes_.size()));
    }
    return {reinterpret_cast<const char*>(bytes_.data()) + kLengthBytes, static_cast<std::size_t>(length)};
  }

  [[nodiscard]] json parse(std::string_view header) const {
    if (header.empty() || header.front() != '{') refuse("the header does not start with '{'");
    std::set<std::string, std::less<>> names;
    std::string twice;
    const auto note_names = [&](int depth, json::parse_event_t event, json& parsed) {
      if (depth == 1 && event == json::parse_event_t::key && !names.insert(parsed.get<std::string>()).second) {
        twice = parsed.get<std::string>();
      }
      return true;
    };
    json result;
    try {
      result = json::parse(header, note_names);
    } catch (const json::exception& error) {
      refuse(fmt::format("the header is not JSON: {}", error.what()));
    }
    if (!twice.empty()) refuse(fmt::format("tensor '{}' is listed twice", twice));
    return result;
  }

  [[nodiscard]] SafetensorsMetadata metadata_from(const json& value) const {
    if (!value.is_object()) refuse("__metadata__ is not an object");
    SafetensorsMetadata metadata;
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) refuse(fmt::format("__metadata__ '{}' is not a string", key));
      metadata.emplace(key, text.get<std::string>());
    }
    return metadata;
  }

  [[nodiscard]] std::int64_t natural(const std::string& tensor, std::string_view field, const json& value) const {
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMost) {
      refuse(fmt::format("tensor '{}': {} has {}, not a whole number from 0 to 2^63 - 1", tensor, field, value.dump()));
    }
    return value.get<std::int64_t>();
  }

  [[nodiscard]] SafetensorsEntry entry_from(const std::string& tensor, const json& value) const {
    if (!value.is_object()) refuse(fmt::format("tensor '{}' is not described by an object", tensor));
    for (const std::string_view field : {"dtype", "shape", "data_offsets"}) {
      if (!value.contains(field)) refuse(fmt::format("tensor '{}' has no '{}'", tensor, field));
    }
    for (const auto& [field, unused] : value.items()) {
      if (field != "dtype" && field != "shape" && field != "data_offsets") {
        refuse(fmt::format("tensor '{}' has an unknown field '{}'", tensor, field));
      }
    }
    const json& dtype = value["dtype"];
    const json& shape = value["shape"];
    const json& offsets = value["data_offsets"];
    const std::optional<DType> known = dtype.is_string() ? dtype_named(dtype.get<std::string>()) : std::nullopt;
    if (!known) {
      refuse(fmt::format("tensor '{}' has dtype {}; known are F64, F32, F16, BF16, I64, I32, I16, I8, U16, U8, BOOL", tensor,
                         dtype.dump()));
    }
    if (!shape.is_array()) refuse(fmt::format("tensor '{}': shape is not an array", tensor));
    if (!offsets.is_array() || offsets.size() != 2) refuse(fmt::format("tensor '{}': data_offsets is not [begin, end]", tensor));
    SafetensorsEntry entry;
    entry.name = tensor;
    entry.dtype = *known;
    for (const json& extent : shape) entry.shape.push_back(natural(tensor, "shape", extent));
    entry.begin_bytes = natural(tensor, "data_offsets", offsets[0]);
    entry.end_bytes = natural(tensor, "data_offsets", offsets[1]);
    check_size(entry);
    return entry;
  }

  void check_size(const SafetensorsEntry& entry) const {
    if (entry.end_bytes < entry.begin_bytes) {
      refuse(fmt::format("tensor '{}' ends at byte {} before it begins at {}", entry.name, entry.end_bytes, entry.begin_bytes));
    }
    auto needed = static_cast<std::int64_t>(tandem::size_bytes(entry.dtype));
    for (const std::int64_t extent : entry.shape) {
      if (__builtin_mul_overflow(needed, extent, &needed)) {
        refuse(fmt::format("tensor '{}' of shape {} has more than 2^63 bytes", entry.name, to_string(entry.shape)));
      }
    }
    if (needed != entry.size_bytes()) {
      refuse(fmt::format("tensor '{}' of shape {} in {} takes {} bytes, data_offsets [{}, {}] give it {}", entry.name,
                         to_string(entry.shape), name(entry.dtype), needed, entry.begin_bytes, entry.end_bytes,
                         entry.size_bytes()));
    }
  }

  void check_coverage(const std::vector<SafetensorsEntry>& sorted, std::int64_t data_bytes) const {
    std::int64_t next = 0;
    for (const SafetensorsEntry& entry : sorted) {
      if (entry.end_bytes > data_bytes) {
        refuse(
            fmt::format("tensor '{}' ends at byte {} of {} bytes of data: truncated?", entry.name, entry.end_bytes, data_bytes));
      }
      if (entry.begin_bytes > next) {
        refuse(fmt::format("bytes {} to {} before tensor '{}' belong to none", next, entry.begin_bytes, entry.name));
      }
      if (entry.begin_bytes < next) {
        refuse(fmt::format("tensor '{}' begins at byte {}, the one before it ends at {}", entry.name, entry.begin_bytes, next));
      }
      next = entry.end_bytes;
    }
    if (next != data_bytes) refuse(fmt::format("{} bytes follow the last tensor, which ends at {}", data_bytes - next, next));
  }

  std::string path_;
  std::span<const std::byte> bytes_;
};

template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Calls visit(index, value) with each element in its own type (16-bit floats as float).
template <class Visit>
void for_each_element(DType dtype, std::span<const std::byte> bytes, const Visit& visit) {
  const auto run = [&]<class Stored>(const auto& decode, Stored) {
    for (std::size_t i = 0; i < bytes.size() / sizeof(Stored); ++i)
      visit(i, decode(load<Stored>(bytes.data() + i * sizeof(Stored))));
  };
  const auto same = [](auto value) { return value; };
  switch (dtype) {
    case DType::f64: return run(same, double{});
    case DType::f32: return run(same, float{});
    case DType::f16: return run(from_f16_bits, std::uint16_t{});
    case DType::bf16: return run(from_bf16_bits, std::uint16_t{});
    case DType::i64: return run(same, std::int64_t{});
    case DType::i32: return run(same, std::int32_t{});
    case DType::i16: return run(same, std::int16_t{});
    case DType::i8: return run(same, std::int8_t{});
    case DType::u16: return run(same, std::uint16_t{});
    case DType::u8: return run(same, std::uint8_t{});
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  HeaderReader(file_).read(entries_, metadata_, data_);
  for (std::size_t i = 0; i < entries_.size(); ++i) index_of_name_.emplace(entries_[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto found = index_of_name_.find(name);
  return found == index_of_name_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const SafetensorsEntry* found = find(name);
  if (found == nullptr) {
    throw InputError(fmt::format("{} has no tensor '{}' among its {}", path().string(), name, entries_.size()));
  }
  return *found;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  return data_.subspan(static_cast<std::size_t>(found.begin_bytes), static_cast<std::size_t>(found.size_bytes()));
}

TensorView SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  if (found.shape.size() > 4) {
    throw InputError(
        fmt::format("{}: tensor '{}' has {} dimensions, a view has at most 4", path().string(), name, found.shape.size()));
  }
  const std::span<const std::byte> data = bytes(name);
  if (reinterpret_cast<std::uintptr_t>(data.data()) % tandem::size_bytes(found.dtype) != 0) {
    throw InputError(
        fmt::format("{}: tensor '{}' starts at byte {} of the data, which is no multiple of its element size; rewrite "
                    "the file with an aligned header",
                    path().string(), name, found.begin_bytes));
  }
  return {const_cast<std::byte*>(data.data()), found.dtype, found.shape};
}

template <class T>
std::vector<T> SafetensorsFile::read_as(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  std::vector<T> values(static_cast<std::size_t>(num_elements(found.shape)));
  for_each_element(found.dtype, bytes(name), [&]<class Stored>(std::size_t index, Stored value) {
    if constexpr (std::is_integral_v<T> && std::is_floating_point_v<Stored>) {
      throw InputError(
          fmt::format("{}: tensor '{}' is {}, integers are needed", path().string(), name, tandem::name(found.dtype)));
    } else {
      if constexpr (std::is_integral_v<T>) {
        if (!std::in_range<T>(value)) {
          throw InputError(fmt::format("{}: tensor '{}' has {} at element {}, which does not fit {}", path().string(), name,
                                       value, index, tandem::name(dtype_of<T>)));
        }
      }
      values[index] = static_cast<T>(value);
    }
  });
  return values;
}

template std::vector<double> SafetensorsFile::read_as<double>(std::string_view) const;
template std::vector<float> SafetensorsFile::read_as<float>(std::string_view) const;
template std::vector<std::int32_t> SafetensorsFile::read_as<std::int32_t>(std::string_view) const;
template std::vector<std::int64_t> SafetensorsFile::read_as<std::int64_t>(std::string_view) const;

std::string safetensors_header(std::span<const TensorHeading> tensors, const SafetensorsMetadata& metadata) {
  json header = json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = std::map<std::string, std::string>(metadata.begin(), metadata.end());
  std::int64_t next = 0;
  std::size_t element = tensors.empty() ? 0 : size_bytes(tensors.front().dtype);
  for (const TensorHeading& tensor : tensors) {
    TANDEM_CHECK(tensor.name != kMetadataKey && !header.contains(tensor.name),
                 fmt::format("tensor name '{}' is reserved or given twice", tensor.name));
    TANDEM_CHECK(size_bytes(tensor.dtype) <= std::exchange(element, size_bytes(tensor.dtype)),
                 fmt::format("tensor '{}' has larger elements than the one before it", tensor.name));
    const std::int64_t end = next + num_elements(tensor.shape) * static_cast<std::int64_t>(element);
    header[tensor.name] = {{"dtype", format_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {next, end}}};
    next = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    throw ContractError(fmt::format("names and metadata of tensors must be UTF-8: {}", error.what()));
  }
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>(std::uint64_t{text.size()} >> (8 * i));
  return length + text;
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const SafetensorsMetadata& metadata) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_bytes(a->view.dtype()) > size_bytes(b->view.dtype());
  });
  std::vector<TensorHeading> headings;
  for (const NamedTensor* tensor : order) {
    const Shape shape = tensor->view.shape();
    TANDEM_CHECK(tensor->view || num_elements(shape) == 0, fmt::format("tensor '{}' has no data", tensor->name));
    headings.push_back({tensor->name, tensor->view.dtype(), shape});
  }
  AtomicFile file(path);
  file.write(safetensors_header(headings, metadata));
  for (const NamedTensor* tensor : order) {
    file.write({static_cast<const std::byte*>(tensor->view.data()), static_cast<std::size_t>(tensor->view.size_bytes())});
  }
  file.commit();
}

}  // namespace tandem
