// SPDX-License-Identifier: Apache-2.0
#include "core/io/safetensors.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

using namespace std::string_literals;

std::string with_length(std::string_view header, std::string_view data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(header.size() >> (8 * i)));
  return file.append(header).append(data);
}

/// The message of the InputError that opening these bytes gives; empty when they open.
std::string refusal(std::string_view bytes) {
  const TestFolder folder;
  const auto path = folder.write("x.safetensors", bytes);
  const std::string message = message_of<InputError>([&] { SafetensorsFile file(path); });
  EXPECT_TRUE(message.empty() || message.find(path.string()) == 0) << "does not start with the file's name: " << message;
  return message;
}

std::string refusal_of_header(std::string_view header, std::string_view data = {}) { return refusal(with_length(header, data)); }

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

TEST(Safetensors, WritesAndReadsEveryDtype) {
  const TestFolder folder;
  std::vector<double> f64 = {1.0 / 3.0, -0.0};
  std::vector<float> f32 = {1.5F, std::numeric_limits<float>::quiet_NaN(), 3};
  std::vector<std::uint16_t> half = {to_f16_bits(0.5F), to_f16_bits(-2.0F)};
  std::vector<std::uint16_t> brain = {to_bf16_bits(3.0F)};
  std::vector<std::int64_t> i64 = {std::int64_t{1} << 40};
  std::vector<std::int32_t> i32 = {-7, 9, 11, 13, 15, 17};
  std::vector<std::int16_t> i16 = {-300};
  std::vector<std::int8_t> i8 = {-100, 100, 3};
  std::vector<std::uint16_t> u16 = {65535};
  std::vector<std::uint8_t> u8 = {255};
  const std::vector<NamedTensor> tensors = {{"u8", view_of(u8, {1})},
                                            {"i8", view_of(i8, {3})},
                                            {"f64", view_of(f64, {2})},
                                            {"f32", view_of(f32, {3, 1})},
                                            {"half", TensorView(half.data(), DType::f16, {2})},
                                            {"brain", TensorView(brain.data(), DType::bf16, {})},
                                            {"i64", view_of(i64, {1, 1, 1, 1})},
                                            {"i32", view_of(i32, {2, 3})},
                                            {"i16", TensorView(i16.data(), DType::i16, {1})},
                                            {"u16", view_of(u16, {1})}};

  write_safetensors(folder / "x", tensors, {{"format", "pt"}, {"step", "12"}});
  const SafetensorsFile file(folder / "x");

  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const NamedTensor& tensor : tensors) {
    const TensorView view = file.tensor(tensor.name);
    EXPECT_EQ(view.dtype(), tensor.view.dtype()) << tensor.name;
    EXPECT_EQ(view.shape(), tensor.view.shape()) << tensor.name;
    EXPECT_EQ(std::memcmp(view.data(), tensor.view.data(), static_cast<std::size_t>(view.size_bytes())), 0) << tensor.name;
  }
  EXPECT_EQ(file.metadata().at("step"), "12");
  EXPECT_EQ(file.read_as<double>("f64"), f64);
  EXPECT_EQ(file.read_as<float>("half"), (std::vector<float>{0.5F, -2.0F}));
  EXPECT_EQ(file.read_as<double>("brain"), std::vector<double>{3.0});
  EXPECT_EQ(file.read_as<std::int32_t>("i8"), (std::vector<std::int32_t>{-100, 100, 3}));
  EXPECT_EQ(file.read_as<std::int64_t>("i32"), (std::vector<std::int64_t>{-7, 9, 11, 13, 15, 17}));
  EXPECT_EQ(file.read_as<double>("u16"), std::vector<double>{65535});
  EXPECT_TRUE(std::isnan(file.read_as<double>("f32")[1]));
}

TEST(Safetensors, PadsTheHeaderSoThatDataIsAligned) {
  const TestFolder folder;
  std::vector<double> values = {1, 2};
  for (const std::string name : {"a", "ab", "abc", "abcd", "abcde"}) {
    write_safetensors(folder / "x", std::vector<NamedTensor>{{name, view_of(values, {2})}});

    EXPECT_EQ((std::filesystem::file_size(folder / "x") - 16) % 8, 0U);
    EXPECT_EQ(SafetensorsFile(folder / "x").tensor(name).as<double>()[1], 2.0);
  }
}

TEST(Safetensors, KeepsTensorsWithoutElementsAndFilesWithoutTensors) {
  const TestFolder folder;
  std::vector<float> nothing;

  write_safetensors(folder / "x", std::vector<NamedTensor>{{"none", view_of(nothing, {0, 5})}});
  write_safetensors(folder / "y", {});

  EXPECT_EQ(SafetensorsFile(folder / "x").entry("none").shape, (Shape{0, 5}));
  EXPECT_TRUE(SafetensorsFile(folder / "x").read_as<float>("none").empty());
  EXPECT_TRUE(SafetensorsFile(folder / "y").entries().empty());
}

TEST(Safetensors, RoundsDoublesToFloats) {
  const TestFolder folder;
  std::vector<double> values = {0.1};
  write_safetensors(folder / "x", std::vector<NamedTensor>{{"v", view_of(values, {1})}});

  EXPECT_EQ(SafetensorsFile(folder / "x").read_as<float>("v"), std::vector<float>{0.1F});
}

TEST(Safetensors, RefusesToTurnFloatsOrTooLargeNumbersIntoIntegers) {
  const TestFolder folder;
  std::vector<double> floats = {1};
  std::vector<std::int64_t> large = {5, std::int64_t{1} << 31};
  write_safetensors(folder / "x", std::vector<NamedTensor>{{"f", view_of(floats, {1})}, {"l", view_of(large, {2})}});
  const SafetensorsFile file(folder / "x");

  EXPECT_SAYS(message_of<InputError>([&] { (void)file.read_as<std::int32_t>("f"); }), "tensor 'f' is fp64, integers are needed");
  EXPECT_SAYS(message_of<InputError>([&] { (void)file.read_as<std::int32_t>("l"); }), "tensor 'l' has 2147483648 at element 1");
}

TEST(Safetensors, NamesAMissingTensor) {
  const TestFolder folder;
  write_safetensors(folder / "x", {});

  const SafetensorsFile file(folder / "x");

  EXPECT_FALSE(file.contains("wte.weight"));
  EXPECT_SAYS(message_of<InputError>([&] { (void)file.tensor("wte.weight"); }), "has no tensor 'wte.weight'");
}

TEST(Safetensors, ReadsAnUnalignedTensorByCopyOnly) {
  const TestFolder folder;
  const auto path = folder.write("x", with_length(R"({"v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )", "\0\0\x80\x3f"s));
  ASSERT_NE((std::filesystem::file_size(path) - 4) % 4, 0U);
  const SafetensorsFile file(path);

  EXPECT_EQ(file.read_as<float>("v"), std::vector<float>{1.0F});
  EXPECT_SAYS(message_of<InputError>([&] { (void)file.tensor("v"); }), "tensor 'v'");
}

TEST(Safetensors, RefusesAViewOfFiveDimensions) {
  const TestFolder folder;
  const auto path = folder.write("x", with_length(R"({"v":{"dtype":"U8","shape":[1,1,1,1,2],"data_offsets":[0,2]}})", "ab"));

  EXPECT_SAYS(message_of<InputError>([&] { (void)SafetensorsFile(path).tensor("v"); }), "5 dimensions");
  EXPECT_EQ(SafetensorsFile(path).read_as<double>("v"), (std::vector<double>{97, 98}));
}

TEST(SafetensorsWriter, RefusesNamesTwiceReservedOrNotText) {
  const TestFolder folder;
  std::vector<float> v = {1};
  const TensorView view = view_of(v, {1});

  EXPECT_THROW(write_safetensors(folder / "x", std::vector<NamedTensor>{{"a", view}, {"a", view}}), ContractError);
  EXPECT_THROW(write_safetensors(folder / "x", std::vector<NamedTensor>{{"__metadata__", view}}), ContractError);
  EXPECT_THROW(write_safetensors(folder / "x", std::vector<NamedTensor>{{"\xFF", view}}), ContractError);
  EXPECT_THROW(write_safetensors(folder / "x", std::vector<NamedTensor>{{"a", TensorView()}}), ContractError);
  EXPECT_EQ(folder.num_files(), 0U);
}

TEST(SafetensorsDamage, EmptyFile) { EXPECT_SAYS(refusal(""), "0 bytes, the header length alone takes 8"); }

TEST(SafetensorsDamage, TruncatedHeaderLength) { EXPECT_SAYS(refusal("\x10\0\0\0"s), "4 bytes, the header length alone"); }

TEST(SafetensorsDamage, HeaderLongerThanTheFile) {
  EXPECT_SAYS(refusal("\x10\0\0\0\0\0\0\0{}"s), "header length 16 reaches beyond the file of 10 bytes");
}

TEST(SafetensorsDamage, AbsurdHeaderLength) {
  EXPECT_SAYS(refusal(std::string(8, '\xFF') + "{}"), "header length 18446744073709551615 is above the limit");
}

TEST(SafetensorsDamage, HeaderOfNoBytes) { EXPECT_SAYS(refusal_of_header(""), "does not start with '{'"); }

TEST(SafetensorsDamage, HeaderThatIsAnArray) { EXPECT_SAYS(refusal_of_header("[1,2]"), "does not start with '{'"); }

TEST(SafetensorsDamage, HeaderThatIsNotJson) { EXPECT_SAYS(refusal_of_header("{\"a\": nothing}"), "the header is not JSON"); }

TEST(SafetensorsDamage, HeaderWithBytesThatAreNotUtf8) {
  EXPECT_SAYS(refusal_of_header("{\"a\xFF\": 1}"), "the header is not JSON");
}

TEST(SafetensorsDamage, MetadataThatIsNotText) {
  EXPECT_SAYS(refusal_of_header(R"({"__metadata__":{"step":5}})"), "__metadata__ 'step' is not a string");
  EXPECT_SAYS(refusal_of_header(R"({"__metadata__":"x"})"), "__metadata__ is not an object");
}

TEST(SafetensorsDamage, TensorListedTwice) {
  const auto* header =
      R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";

  EXPECT_SAYS(refusal_of_header(header, "a"), "tensor 'v' is listed twice");
}

TEST(SafetensorsDamage, UnknownDtype) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", "a"),
              "tensor 'v' has dtype \"F8_E4M3\"; known are");
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", "a"), "tensor 'v' has dtype 7");
}

TEST(SafetensorsDamage, MissingField) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","data_offsets":[0,1]}})", "a"), "tensor 'v' has no 'shape'");
  EXPECT_SAYS(refusal_of_header(R"({"v":3})"), "tensor 'v' is not described by an object");
}

TEST(SafetensorsDamage, UnknownField) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":1}})", "a"),
              "unknown field 'stride'");
}

TEST(SafetensorsDamage, NegativeOrFractionalExtent) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "a"), "shape has -1");
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "a"), "shape has 1.5");
}

TEST(SafetensorsDamage, ShapeThatOverflows) {
  const auto* header = R"({"v":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})";

  EXPECT_SAYS(refusal_of_header(header), "more than 2^63 bytes");
}

TEST(SafetensorsDamage, ShapeThatDoesNotFitTheOffsets) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}})", std::string(20, 'x')),
              "tensor 'v' of shape [2, 3] in fp32 takes 24 bytes, data_offsets [0, 20] give it 20");
}

TEST(SafetensorsDamage, OffsetsThatAreNotAPair) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "a"),
              "data_offsets is not [begin, end]");
}

TEST(SafetensorsDamage, OffsetsThatRunBackwards) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "a"),
              "ends at byte 0 before it begins at 1");
}

TEST(SafetensorsDamage, NegativeOffset) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", "a"), "data_offsets has -1");
}

TEST(SafetensorsDamage, TensorBeyondTheFile) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}})", "abcd"),
              "tensor 'v' ends at byte 5 of 4 bytes of data");
}

TEST(SafetensorsDamage, HoleBetweenTensors) {
  const auto* header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})";

  EXPECT_SAYS(refusal_of_header(header, "abc"), "bytes 1 to 2 before tensor 'b' belong to none");
}

TEST(SafetensorsDamage, OverlappingTensors) {
  const auto* header =
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})";

  EXPECT_SAYS(refusal_of_header(header, "abc"), "tensor 'b' begins at byte 1, the one before it ends at 2");
}

TEST(SafetensorsDamage, BytesAfterTheLastTensor) {
  EXPECT_SAYS(refusal_of_header(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "abc"),
              "2 bytes follow the last tensor");
}

TEST(SafetensorsDamage, EveryTruncationIsRefused) {
  const TestFolder folder;
  std::vector<float> v = {1, 2, 3};
  write_safetensors(folder / "x", std::vector<NamedTensor>{{"v", view_of(v, {3})}});
  const std::string whole = TestFolder::read(folder / "x");

  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(refusal(std::string_view(whole).substr(0, size)).empty()) << size << " of " << whole.size() << " bytes";
  }
}

}  // namespace
}  // namespace tandem
