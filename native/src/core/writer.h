// Writes tokens with the program of a language model, as the methods of src/lapilli/llm/token_methods.py take them: one sequence,
// whose keys and values are states of the program.
#pragma once

#include "core/program.h"

namespace lapilli {

class Writer {
public:
  // Throws INVALID_ARGUMENT where the program is no language model.
  explicit Writer(std::shared_ptr<Program> program);

  uint32_t context() const { return context_; }
  uint32_t words() const { return words_; }
  uint64_t read() const { return read_; } // how many tokens were computed; those that the cache had were not

  // What comes next follows these tokens. What they begin with like the last ones is not read again.
  void begin(std::span<const int32_t> tokens, const lapilli_sampling& sampling);
  struct Token {
    int32_t token;
    float log_probability; // by the model's own logits
  };
  // Throws OUT_OF_RANGE where the context is full.
  Token next();

private:
  uint32_t method(std::string_view name) const;
  Token run(uint32_t method, std::span<const lapilli_tensor> inputs);
  void remember();
  void forget() noexcept { cached_ = 0; }

  const std::shared_ptr<Program> program_;
  uint32_t context_ = 0, words_ = 0;
  uint32_t prompt_ = 0, step_ = 0, remember_ = 0; // methods
  size_t longest_ = 0;                            // tokens of a prompt that are read at once
  std::mutex mutex_;
  lapilli_sampling sampling_{};
  std::vector<int32_t> tokens_; // given and written
  size_t given_ = 0;            // of these
  size_t cached_ = 0;           // of these in the cache
  std::atomic<uint64_t> read_{0};
};

} // namespace lapilli
