// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/mapped_file.h"
#include "core/tensor.h"

namespace tandem {

/// Free text beside the tensors; the format allows strings only.
using SafetensorsMetadata = std::map<std::string, std::string, std::less<>>;

/// One tensor of a safetensors file. Offsets count from the first byte after the header.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::int64_t begin_bytes = 0;
  std::int64_t end_bytes = 0;
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return end_bytes - begin_bytes; }
};

/// A safetensors file, mapped read-only. Byte layout: docs/formats.md.
///
/// The constructor checks everything but the values: header length, JSON, names given once, known dtypes (F64 F32 F16 BF16 I64
/// I32 I16 I8 U16 U8; BOOL reads as U8), shapes, and that the tensors fill the data exactly, without hole or overlap. What is
/// wrong is an InputError that names file, tensor and numbers. Safe to read from several threads.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// In the order of their bytes.
  [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const SafetensorsMetadata& metadata() const noexcept { return metadata_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }

  [[nodiscard]] bool contains(std::string_view name) const noexcept { return find(name) != nullptr; }
  /// Throws InputError where there is no such tensor.
  [[nodiscard]] const SafetensorsEntry& entry(std::string_view name) const;

  /// View of the mapped bytes: valid while this file is, and read-only (writing through it is a fault of the caller that the
  /// system answers with SIGSEGV). Throws InputError where the tensor is missing, has more than four dimensions or does not start
  /// at a multiple of its element size; read_as() takes those too.
  [[nodiscard]] TensorView tensor(std::string_view name) const;
  [[nodiscard]] std::span<const std::byte> bytes(std::string_view name) const;

  /// The elements as T = double, float, std::int32_t or std::int64_t, converted one by one: floating to floating (rounded to
  /// nearest), integer to anything. Throws InputError where the tensor is missing, where a floating tensor is asked for as
  /// integers, or where an integer does not fit into T.
  template <class T>
  [[nodiscard]] std::vector<T> read_as(std::string_view name) const;

 private:
  [[nodiscard]] const SafetensorsEntry* find(std::string_view name) const noexcept;

  MappedFile file_;
  std::span<const std::byte> data_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_of_name_;
  SafetensorsMetadata metadata_;
};

/// A tensor that is to be written.
struct TensorHeading {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
};

/// What a safetensors file begins with, length included; the bytes of the tensors follow in the order given, without gaps. Throws
/// ContractError on a name given twice or reserved ("__metadata__") and where a tensor has larger elements than the one before
/// it: it might not be aligned.
[[nodiscard]] std::string safetensors_header(std::span<const TensorHeading> tensors, const SafetensorsMetadata& metadata = {});

struct NamedTensor {
  std::string name;
  TensorView view;  ///< borrowed until the file is written
};

/// Writes the tensors as one safetensors file, atomically. The bytes lie in the order of element size, largest first, then as
/// given, so that every tensor is aligned (the format's own writer does the same). Throws ContractError on a name given twice or
/// reserved ("__metadata__") and on a view without data; IoError as AtomicFile.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const SafetensorsMetadata& metadata = {});

}  // namespace tandem
