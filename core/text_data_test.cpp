// SPDX-License-Identifier: Apache-2.0
#include "core/text_data.h"

#include <gtest/gtest.h>

#include "core/io/test_folder.h"

namespace tandem {
namespace {

TEST(Tokenizer, BytesRoundTripAndLeaveTheEndOfDocumentOut) {
  std::vector<std::int32_t> tokens = encode_bytes("é\n");
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{0xC3, 0xA9, 10}));

  tokens.push_back(kEndOfDocument);

  EXPECT_EQ(decode_bytes(tokens), "é\n");
}

TEST(Tokenizer, NamesWhatExistsWhenAskedForAnother) {
  EXPECT_EQ(find_tokenizer("bytes").vocabulary, 256);
  EXPECT_EQ(message_of<InputError>([] { (void)find_tokenizer("bpe:8000"); }),
            "tokenizer 'bpe:8000' does not exist; there is: bytes");
}

TEST(DocumentRules, NamesAreReadBack) {
  for (const DocumentRule rule : {DocumentRule::file, DocumentRule::paragraph, DocumentRule::line}) {
    EXPECT_EQ(parse_document_rule(name(rule)), rule);
  }
  EXPECT_EQ(message_of<InputError>([] { (void)parse_document_rule("page"); }),
            "document rule 'page' does not exist; there are: file, paragraph, line");
}

TEST(TextDataOptions, RefusesWhatIsOutOfRange) {
  EXPECT_NO_THROW(validate(TextDataOptions{}));
  EXPECT_EQ(message_of<InputError>([] { validate(TextDataOptions{.sequence = 0}); }), "sequence is 0, it must be at least 1");
  EXPECT_EQ(message_of<InputError>([] { validate({.validation_fraction = 1}); }),
            "validation_fraction is 1, it must be at least 0 and below 1");
  EXPECT_EQ(message_of<InputError>([] { validate({.bucket_batches = 0}); }), "bucket_batches is 0, it must be at least 1");
  EXPECT_EQ(message_of<InputError>([] { validate({.sequence = 64, .batching = Batching::padded, .pad_multiple = 24}); }),
            "pad_multiple is 24; it must divide the sequence of 64, which is the longest that a row can be");
  EXPECT_NO_THROW(validate({.sequence = 64, .batching = Batching::packed, .pad_multiple = 24})) << "of no matter there";
  EXPECT_THROW(validate({.validation_fraction = -0.1}), InputError);
  EXPECT_THROW(validate({.validation_fraction = std::numeric_limits<double>::quiet_NaN()}), InputError);
}

}  // namespace
}  // namespace tandem
