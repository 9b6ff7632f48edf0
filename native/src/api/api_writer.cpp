// The part of the C ABI for language models.

#include "api/api.h"
#include "base/fork.h"
#include "core/writer.h"

struct lapilli_writer {
  lapilli::Writer writer;
};

using namespace lapilli;

namespace {

Writer& checked(lapilli_writer* writer) {
  need(writer, "writer");
  refuse_in_child();
  return writer->writer;
}

} // namespace

lapilli_status lapilli_writer_create(lapilli_program* program, lapilli_writer** writer) {
  return guarded_writer([&] {
    need(writer, "writer");
    lapilli::checked(program);
    *writer = new lapilli_writer{Writer(program->program)};
  });
}

void lapilli_writer_destroy(lapilli_writer* writer) {
  if (!is_forked())
    delete writer;
}

lapilli_status lapilli_writer_describe(lapilli_writer* writer, lapilli_writer_info* info) {
  return guarded_writer([&] {
    need(info, "info");
    const Writer& described = ::checked(writer);
    *info = {described.context(), described.words(), described.read()};
  });
}

lapilli_status lapilli_writer_begin(lapilli_writer* writer, const int32_t* tokens, uint64_t n_tokens,
                                    const lapilli_sampling* sampling) {
  return guarded_writer([&] {
    const lapilli_sampling likeliest{0, 1, 0, 1, 0, 0};
    ::checked(writer).begin(items(tokens, n_tokens, "tokens"), sampling != nullptr ? *sampling : likeliest);
  });
}

lapilli_status lapilli_writer_next(lapilli_writer* writer, int32_t* token, float* log_probability) {
  return guarded_writer([&] {
    need(token, "token");
    const Writer::Token found = ::checked(writer).next();
    *token = found.token;
    if (log_probability != nullptr)
      *log_probability = found.log_probability;
  });
}
