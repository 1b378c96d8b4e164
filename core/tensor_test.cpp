// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.h"

#include <numeric>

#include <gtest/gtest.h>

namespace tandem {
namespace {

std::vector<float> counted(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

TEST(Shape, CountsElementsAndPrints) {
  EXPECT_EQ(num_elements(Shape{}), 1);
  EXPECT_EQ(num_elements(Shape{4, 0, 3}), 0);
  EXPECT_EQ(num_elements(Shape{2, 3, 5}), 30);
  EXPECT_EQ(to_string(Shape{4, 16, 64}), "[4, 16, 64]");
  EXPECT_EQ(to_string(Shape{}), "[]");
}

TEST(TensorView, DescribesItsElements) {
  auto values = counted(24);
  const TensorView view = view_of(values, {2, 3, 4});

  EXPECT_EQ(view.num_dims(), 3);
  EXPECT_EQ(view.dim(1), 3);
  EXPECT_EQ(view.shape(), (Shape{2, 3, 4}));
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.size_bytes(), 96);
  EXPECT_EQ(view.dtype(), DType::f32);
  EXPECT_EQ(view.data(), values.data());
  EXPECT_TRUE(static_cast<bool>(view));
  EXPECT_THROW((void)view.dim(3), ContractError);
  EXPECT_THROW((void)view.dim(-1), ContractError);
}

TEST(TensorView, DefaultIsEmpty) {
  const TensorView view;
  EXPECT_FALSE(static_cast<bool>(view));
  EXPECT_EQ(view.num_elements(), 0);
  EXPECT_EQ(view.size_bytes(), 0);
}

TEST(TensorView, FlatPartsShareTheMemory) {
  auto values = counted(12);
  const TensorView part = view_of(values, {3, 4}).flat(5, 3);

  ASSERT_EQ(part.shape(), Shape{3});
  part.as<float>()[0] = -1.0F;
  EXPECT_EQ(values[5], -1.0F);
  EXPECT_EQ(part.as<float>()[2], 7.0F);
}

TEST(TensorView, RowsAreThoseOfTheOutermostDimension) {
  auto values = counted(24);
  const TensorView rows = view_of(values, {4, 2, 3}).rows(1, 2);

  EXPECT_EQ(rows.shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(rows.as<float>().front(), 6.0F);
  EXPECT_EQ(rows.as<float>().back(), 17.0F);
  EXPECT_EQ(view_of(values, {4, 2, 3}).rows(4, 0).num_elements(), 0);
}

TEST(TensorView, ReshapeKeepsTheElements) {
  auto values = counted(12);
  const TensorView view = view_of(values, {3, 4}).reshaped({2, 6});

  EXPECT_EQ(view.shape(), (Shape{2, 6}));
  EXPECT_EQ(view.data(), values.data());
  EXPECT_THROW((void)view.reshaped({5, 2}), ContractError);
}

TEST(TensorView, RefusesWhatLiesOutside) {
  auto values = counted(12);
  const TensorView view = view_of(values, {3, 4});

  EXPECT_THROW((void)view.flat(10, 3), ContractError);
  EXPECT_THROW((void)view.flat(-1, 3), ContractError);
  EXPECT_THROW((void)view.rows(2, 2), ContractError);
  EXPECT_THROW((void)view.rows(0, -1), ContractError);
  EXPECT_THROW((void)view.as<double>(), ContractError);
  EXPECT_THROW((void)view_of(values, {3, 5}), ContractError);
  EXPECT_THROW((void)TensorView(values.data(), DType::f32, {1, 1, 1, 3, 4}), ContractError);
}

TEST(TensorView, GivesConstElementsToReaders) {
  auto values = counted(3);
  const auto elements = view_of(values, {3}).as<const float>();
  static_assert(std::is_const_v<decltype(elements)::element_type>);
  EXPECT_EQ(elements[2], 2.0F);
}

}  // namespace
}  // namespace tandem
