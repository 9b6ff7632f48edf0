#include "reader.h"

#include "error.h"
#include "expr.h"
#include "spirv.h"

#include <algorithm>
#include <map>

namespace lapilli {

namespace {

template <class T> using Vector = flatbuffers::Vector<T>;
template <class T> using Tables = const Vector<flatbuffers::Offset<T>>*;

// Several offsets of a FlatBuffer may point to the same bytes, so a small damaged file could describe a huge program.
// All that is copied out of the structure counts against a budget that is proportional to its size.
class Reader {
public:
  explicit Reader(const Container& container)
      : container_(container), budget_(container.structure.size() * 16 + (1u << 16)) {}

  Model run() {
    const schema::Program* program = verified_root();
    model_.producer = text(program->producer());
    each(program->metadata(),
         [&](const schema::Metadata& entry) { model_.metadata.emplace_back(text(entry.key()), text(entry.value())); });
    each(program->constants(), [&](const schema::Constant& found) { constant(found); });
    each(program->states(), [&](const schema::State& found) { state(found); });
    each(program->host_operators(),
         [&](const flatbuffers::String& name) { model_.host_operators.push_back(text(&name)); });
    each(program->kernels(), [&](const schema::Kernel& found) { kernel(found); });
    each(program->methods(), [&](const schema::Method& found) { method(found); });
    check_file(!model_.methods.empty(), "The program has no methods.");
    return std::move(model_);
  }

private:
  const schema::Program* verified_root() {
    const Bytes bytes = container_.structure;
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    flatbuffers::Verifier::Options options;
    options.max_depth = 16;
    options.max_tables = static_cast<flatbuffers::uoffset_t>(std::min<size_t>(bytes.size() / 4 + 16, 1u << 24));
    options.max_size = size_t{1} << 30;
    check_file(bytes.size() >= 8 && bytes.size() < options.max_size, "The structure of the program is damaged: it has ",
               bytes.size(), " bytes.");
    flatbuffers::Verifier verifier(data, bytes.size(), options);
    check_file(schema::VerifyProgramBuffer(verifier), "The structure of the program is damaged.");
    return schema::GetProgram(data);
  }

  void charge(size_t bytes) {
    check_file(bytes <= budget_, "The structure of the program is damaged: it names the same parts again and again.");
    budget_ -= bytes;
  }

  template <class T, class F> void each(const T* vector, F&& f) {
    if (vector == nullptr)
      return;
    for (const auto* item : *vector) {
      charge(sizeof(uint32_t));
      f(*item);
    }
  }

  std::string text(const flatbuffers::String* string) {
    if (string == nullptr)
      return {};
    charge(string->size());
    return string->str();
  }

  std::vector<uint32_t> numbers(const Vector<uint32_t>* vector) {
    if (vector == nullptr)
      return {};
    charge(vector->size() * sizeof(uint32_t));
    return {vector->begin(), vector->end()};
  }

  // A part of the data section.
  Bytes section(uint64_t offset, uint64_t size, const std::string& what) {
    const uint64_t total = container_.data.size();
    check_file(offset <= total && size <= total - offset, "The program is damaged: ", what, " (", size, " bytes at ",
               offset, ") lies outside of the data section of ", total, " bytes.");
    check_file(offset % 64 == 0, "The program is damaged: ", what, " is at ", offset,
               ", which is not a multiple of 64.");
    return container_.data.subspan(static_cast<size_t>(offset), static_cast<size_t>(size));
  }

  static void dtype(DType found, const std::string& what) {
    check_file(found >= DType::MIN && found <= DType::MAX, "The program is damaged: ", what, " has dtype ",
               static_cast<unsigned>(found), ".");
  }

  void constant(const schema::Constant& found) {
    Constant result{text(found.name()), found.dtype(), numbers(found.shape()), found.offset(), {}};
    const std::string what = cat("constant \"", result.name, "\"");
    dtype(result.dtype, what);
    check_file(result.shape.size() <= 64, "The program is damaged: ", what, " has ", result.shape.size(),
               " dimensions.");
    result.bytes = section(found.offset(), found.size(), what);
    const std::vector<int64_t> shape(result.shape.begin(), result.shape.end());
    uint64_t bytes = 0;
    check_file(tensor_bytes(shape, result.dtype, bytes) && bytes == found.size(), "The program is damaged: ", what,
               " has ", found.size(), " bytes, which does not fit its shape.");
    model_.constants.push_back(std::move(result));
  }

  void state(const schema::State& found) {
    State result{text(found.name()), found.dtype(), numbers(found.shape()), found.constant(), 0};
    const std::string what = cat("state \"", result.name, "\"");
    check_file(!result.name.empty() &&
                   std::ranges::none_of(model_.states, [&](const State& other) { return other.name == result.name; }),
               "The program is damaged: there are two states of the name \"", result.name, "\", or it is empty.");
    dtype(result.dtype, what);
    check_file(result.shape.size() <= max_rank, "The program is damaged: ", what, " has ", result.shape.size(),
               " dimensions; at most ", max_rank, " are possible.");
    const std::vector<int64_t> shape(result.shape.begin(), result.shape.end());
    check_file(tensor_bytes(shape, result.dtype, result.bytes), "The program is damaged: ", what, " is too large.");
    if (result.constant != -1) {
      check_file(result.constant >= 0 && static_cast<size_t>(result.constant) < model_.constants.size(),
                 "The program is damaged: ", what, " begins as constant ", result.constant, " of ",
                 model_.constants.size(), ".");
      const Constant& initial = model_.constants[static_cast<size_t>(result.constant)];
      check_file(initial.dtype == result.dtype && initial.shape == result.shape, "The program is damaged: ", what,
                 " is of another dtype or shape than its initial value.");
    }
    model_.states.push_back(std::move(result));
  }

  void checks(const schema::Method& found, Method& result) {
    each(found.checks(), [&](const flatbuffers::String& name) { result.checks.push_back(text(&name)); });
    result.integer_limit = found.integer_limit();
    check_file(result.integer_limit >= 0, "The program is damaged: inputs of method \"", result.name,
               "\" are limited to ", result.integer_limit, ".");
    check_file(result.checks.empty() || (!result.outputs.empty() && result.outputs.back().dtype == DType::int32 &&
                                         result.outputs.back().shape.empty()),
               "The program is damaged: method \"", result.name, "\" has checks, and no output for their result.");
  }

  void kernel(const schema::Kernel& found) {
    Kernel result{};
    result.name = text(found.name());
    const std::string what = cat("kernel \"", result.name, "\"");
    result.code_offset = found.code_offset();
    result.code = section(found.code_offset(), found.code_size(), what);
    result.bindings = found.bindings();
    result.push_size = found.push_size();
    result.local = {found.local_x(), found.local_y(), found.local_z()};
    result.subgroup_size = found.subgroup_size();
    result.shared_size = found.shared_size();
    check_file(result.bindings <= max_bindings, "The program is damaged: ", what, " has ", result.bindings,
               " bindings.");
    result.types.assign(result.bindings, BindingType::storage);
    if (const auto* types = found.texel(); types != nullptr && types->size() > 0) {
      check_file(types->size() == result.bindings, "The program is damaged: ", what, " has ", result.bindings,
                 " bindings and ", types->size(), " types of them.");
      for (uint32_t i = 0; i < result.bindings; ++i) {
        result.types[i] = static_cast<BindingType>(types->Get(i));
        check_file(result.types[i] <= BindingType::MAX, "The program is damaged: ", what,
                   " has a binding of unknown type.");
      }
    }
    check_file(result.push_size <= max_push_size && result.push_size % 4 == 0, "The program is damaged: ", what,
               " has ", result.push_size, " bytes of push constants.");
    const uint32_t subgroup = result.subgroup_size;
    check_file(subgroup <= 1024 && (subgroup & (subgroup - 1)) == 0, "The program is damaged: ", what,
               " wants subgroups of ", subgroup, ".");
    // Two kernels may share their code, so what is walked is limited too.
    check_file(result.code.size() <= code_budget_, "The program is damaged: its kernels overlap.");
    code_budget_ -= result.code.size();
    verify_spirv(result);
    model_.kernels.push_back(std::move(result));
  }

  void method(const schema::Method& found) {
    Method result{};
    result.name = text(found.name());
    each(found.symbols(), [&](const schema::Symbol& symbol) {
      result.symbols.push_back({text(symbol.name()), symbol.min(), symbol.max(), symbol.input(), symbol.axis(),
                                symbol.factor(), symbol.offset()});
    });
    check_file(result.symbols.size() <= max_symbols, "The program has ", result.symbols.size(),
               " symbols in one method; at most ", max_symbols, " are possible.");
    exprs(found, result);
    each(found.inputs(), [&](const schema::TensorSpec& spec) { result.inputs.push_back(tensor(spec, result)); });
    each(found.outputs(), [&](const schema::TensorSpec& spec) { result.outputs.push_back(tensor(spec, result)); });
    checks(found, result);
    for (const Symbol& symbol : result.symbols) {
      check_file(symbol.input < result.inputs.size() && symbol.axis < result.inputs[symbol.input].shape.size(),
                 "The program is damaged: symbol ", symbol.name, " is read from axis ", symbol.axis, " of input ",
                 symbol.input, ", which does not exist.");
      check_file(symbol.min >= 0 && (symbol.max == -1 || symbol.max >= symbol.min), "The program is damaged: symbol ",
                 symbol.name, " has bounds ", symbol.min, "..", symbol.max, ".");
      check_file(symbol.factor >= 1, "The program is damaged: symbol ", symbol.name, " has factor ", symbol.factor,
                 ".");
    }
    const std::vector<bool> dynamic = symbolic(result.exprs);
    each(found.plans(), [&](const schema::Plan& plan_found) { plan(plan_found, result, dynamic); });
    check_file(!result.plans.empty(), "Method \"", result.name, "\" of the program has no plans.");
    model_.methods.push_back(std::move(result));
  }

  void exprs(const schema::Method& found, Method& method) {
    const auto* pool = found.exprs();
    if (pool == nullptr)
      return;
    charge(pool->size() * sizeof(schema::Expr));
    method.exprs.reserve(pool->size());
    for (uint32_t i = 0; i < pool->size(); ++i) {
      const schema::Expr& expr = *pool->Get(i);
      bool holds = expr.op() >= ExprOp::MIN && expr.op() <= ExprOp::MAX;
      if (holds && expr.op() == ExprOp::symbol)
        holds = expr.value() >= 0 && static_cast<uint64_t>(expr.value()) < method.symbols.size();
      else if (holds && expr.op() != ExprOp::constant)
        holds = expr.a() < i && expr.b() < i;
      check_file(holds, "The program is damaged: expression ", i, " of method \"", method.name, "\" is invalid.");
      method.exprs.push_back({expr.value(), expr.a(), expr.b(), expr.op()});
    }
  }

  static void expr(ExprIndex index, const Method& method, const char* what) {
    check_file(index < method.exprs.size(), "The program is damaged: ", what, " names expression ", index, " of ",
               method.exprs.size(), ".");
  }

  TensorSpec tensor(const schema::TensorSpec& found, const Method& method) {
    TensorSpec result{text(found.name()), found.dtype(), numbers(found.shape())};
    dtype(result.dtype, result.name);
    check_file(result.shape.size() <= max_rank, "The program is damaged: \"", result.name, "\" has ",
               result.shape.size(), " dimensions; at most ", max_rank, " are possible.");
    for (const ExprIndex index : result.shape)
      expr(index, method, "a shape");
    return result;
  }

  void plan(const schema::Plan& found, Method& method, const std::vector<bool>& dynamic) {
    Plan result{};
    result.name = text(found.name());
    if (const auto* requirements = found.requirements())
      result.requirements = {requirements->device(),
                             requirements->features(),
                             requirements->max_workgroup_invocations(),
                             {requirements->max_workgroup_size_x(), requirements->max_workgroup_size_y(),
                              requirements->max_workgroup_size_z()},
                             requirements->shared_memory(),
                             requirements->subgroup_size(),
                             requirements->subgroup_operations(),
                             requirements->max_bindings(),
                             requirements->max_texel_elements()};
    check_file(result.requirements.device <= DeviceKind::MAX, "The program is damaged: plan \"", result.name,
               "\" asks for an unknown kind of device.");
    const size_t n_run = found.run() == nullptr ? 0 : found.run()->size();
    std::vector<uint32_t> seen_inputs(method.inputs.size()), seen_outputs(method.outputs.size()),
        seen_states(model_.states.size());
    each(found.buffers(), [&](const schema::Buffer& item) {
      Buffer buffer{text(item.name()), item.kind(), item.index(), item.size(), item.first(), item.last()};
      const auto below = [&](size_t count) {
        check_file(buffer.index < count, "The program is damaged: buffer \"", buffer.name, "\" has index ",
                   buffer.index, " of ", count, ".");
      };
      expr(buffer.size, method, "a buffer");
      switch (buffer.kind) {
      case BufferKind::constant:
      case BufferKind::load_constant:
        below(model_.constants.size());
        fixed(buffer, dynamic);
        break;
      case BufferKind::packed:
        fixed(buffer, dynamic);
        break;
      case BufferKind::arena:
        check_file(buffer.first <= buffer.last && buffer.last < n_run, "The program is damaged: buffer \"", buffer.name,
                   "\" lives over commands ", buffer.first, "..", buffer.last, " of ", n_run, ".");
        break;
      case BufferKind::input:
        below(method.inputs.size());
        ++seen_inputs[buffer.index];
        break;
      case BufferKind::output:
        below(method.outputs.size());
        ++seen_outputs[buffer.index];
        break;
      case BufferKind::state:
        below(model_.states.size());
        fixed(buffer, dynamic);
        ++seen_states[buffer.index];
        break;
      default:
        invalid_file("The program is damaged: buffer \"", buffer.name, "\" is of an unknown kind.");
      }
      result.buffers.push_back(std::move(buffer));
    });
    for (const uint32_t count : seen_inputs)
      check_file(count <= 1, "The program is damaged: plan \"", result.name, "\" has two buffers for one input.");
    for (const uint32_t count : seen_outputs)
      check_file(count == 1, "The program is damaged: plan \"", result.name,
                 "\" must have one buffer for each output.");
    for (const uint32_t count : seen_states)
      check_file(count <= 1, "The program is damaged: plan \"", result.name, "\" has two buffers for one state.");
    commands(found.load(), result.load, true, method, result, dynamic);
    commands(found.run(), result.run, false, method, result, dynamic);
    method.plans.push_back(std::move(result));
  }

  // What is made while loading cannot depend on the sizes of a run.
  static void fixed(const Buffer& buffer, const std::vector<bool>& dynamic) {
    check_file(!dynamic[buffer.size], "The program is damaged: the size of buffer \"", buffer.name,
               "\" is needed at load and depends on an input.");
  }

  void commands(Tables<schema::Dispatch> found, std::vector<Dispatch>& into, bool loading, const Method& method,
                const Plan& plan, const std::vector<bool>& dynamic) {
    each(found, [&](const schema::Dispatch& item) {
      into.push_back(dispatch(item, static_cast<uint32_t>(into.size()), loading, method, plan));
      if (loading)
        at_load(into.back(), dynamic);
    });
  }

  Dispatch dispatch(const schema::Dispatch& found, uint32_t position, bool loading, const Method& method,
                    const Plan& plan) {
    Dispatch result{};
    result.label = text(found.label());
    result.kernel = found.kernel();
    result.written = found.written();
    result.barrier = found.barrier();
    result.params = numbers(found.params());
    result.groups = {found.groups_x(), found.groups_y(), found.groups_z()};
    result.flops = found.flops();
    result.bytes = found.bytes();
    const std::string what = cat(loading ? "load" : "run", " command ", position, " (", result.label, ")");
    check_file(result.kernel < model_.kernels.size(), "The program is damaged: ", what, " names kernel ", result.kernel,
               " of ", model_.kernels.size(), ".");
    const Kernel& kernel = model_.kernels[result.kernel];
    if (const auto* bindings = found.bindings()) {
      charge(bindings->size() * sizeof(schema::Binding));
      for (const schema::Binding* item : *bindings)
        result.bindings.push_back({item->buffer(), item->offset(), item->size()});
    }
    check_file(result.bindings.size() == kernel.bindings, "The program is damaged: ", what, " gives ",
               result.bindings.size(), " bindings to kernel \"", kernel.name, "\", which has ", kernel.bindings, ".");
    check_file(result.params.size() * 4 == kernel.push_size, "The program is damaged: ", what, " gives ",
               result.params.size() * 4, " bytes of push constants to kernel \"", kernel.name, "\", which has ",
               kernel.push_size, ".");
    check_file(kernel.bindings == max_bindings || result.written >> kernel.bindings == 0,
               "The program is damaged: ", what, " writes bindings that it does not have.");
    for (const ExprIndex index : result.params)
      expr(index, method, "a parameter");
    for (const ExprIndex index : result.groups)
      expr(index, method, "a number of work groups");
    expr(result.flops, method, "a number of operations");
    expr(result.bytes, method, "a number of bytes");
    for (size_t i = 0; i < result.bindings.size(); ++i)
      binding(result, i, kernel.types[i], what, position, loading, method, plan);
    return result;
  }

  static void binding(const Dispatch& dispatch, size_t index, BindingType type, const std::string& what,
                      uint32_t position, bool loading, const Method& method, const Plan& plan) {
    const Binding& binding = dispatch.bindings[index];
    expr(binding.offset, method, "a binding");
    expr(binding.size, method, "a binding");
    check_file(binding.buffer < plan.buffers.size(), "The program is damaged: ", what, " names buffer ", binding.buffer,
               " of ", plan.buffers.size(), ".");
    const Buffer& buffer = plan.buffers[binding.buffer];
    const bool written = dispatch.written >> index & 1;
    check_file(!written || type == BindingType::storage, "The program is damaged: ", what, " writes a texel buffer.");
    bool allowed = false;
    switch (buffer.kind) {
    case BufferKind::constant:
    case BufferKind::load_constant:
      allowed = !written && (loading || buffer.kind == BufferKind::constant);
      break;
    case BufferKind::packed:
      allowed = loading || !written;
      break;
    case BufferKind::input:
      allowed = !loading && !written;
      break;
    case BufferKind::output:
    case BufferKind::state:
      allowed = !loading;
      break;
    case BufferKind::arena:
      allowed = !loading && buffer.first <= position && position <= buffer.last;
      break;
    }
    check_file(allowed, "The program is damaged: ", what, " may not ", written ? "write" : "read", " buffer \"",
               buffer.name, "\" of kind ", name_of(buffer.kind), ".");
  }

  static void at_load(const Dispatch& dispatch, const std::vector<bool>& dynamic) {
    bool depends = false;
    for (const Binding& binding : dispatch.bindings)
      depends = depends || dynamic[binding.offset] || dynamic[binding.size];
    for (const ExprIndex index : dispatch.params)
      depends = depends || dynamic[index];
    for (const ExprIndex index : dispatch.groups)
      depends = depends || dynamic[index];
    check_file(!depends, "The program is damaged: load command \"", dispatch.label, "\" depends on an input.");
  }

  const Container& container_;
  size_t budget_;
  size_t code_budget_ = container_.data.size() * 4 + 4096;
  Model model_;
};

} // namespace

Model read_model(const Container& container) { return Reader(container).run(); }

} // namespace lapilli
