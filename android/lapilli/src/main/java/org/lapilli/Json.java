package org.lapilli;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** JSON as maps, lists, texts, numbers, truth values and null: what a file says of its language model. */
final class Json {
  private static final int DEEPEST = 64;
  private final String text;
  private int at;

  private Json(String text) {
    this.text = text;
  }

  /** Throws LapilliException where it is none. */
  static Object parse(String text) {
    Json json = new Json(text);
    try {
      Object value = json.value(0);
      json.space();
      if (json.at != text.length()) throw json.wrong();
      return value;
    } catch (StringIndexOutOfBoundsException | NumberFormatException end) {
      throw json.wrong();
    }
  }

  private LapilliException wrong() {
    return new LapilliException(
        LapilliException.Status.INVALID_FILE, "The language model is damaged: its metadata are no JSON at character " + at + ".");
  }

  private void space() {
    while (at < text.length() && " \n\r\t".indexOf(text.charAt(at)) >= 0) ++at;
  }

  private boolean take(char c) {
    space();
    if (text.charAt(at) != c) return false;
    ++at;
    return true;
  }

  private void need(char c) {
    if (!take(c)) throw wrong();
  }

  private Object value(int depth) {
    if (depth > DEEPEST) throw wrong();
    if (take('{')) {
      Map<String, Object> map = new LinkedHashMap<>();
      if (take('}')) return map;
      do {
        need('"');
        String key = string();
        need(':');
        map.put(key, value(depth + 1));
      } while (take(','));
      need('}');
      return map;
    }
    if (take('[')) {
      List<Object> list = new ArrayList<>();
      if (take(']')) return list;
      do list.add(value(depth + 1)); while (take(','));
      need(']');
      return list;
    }
    if (take('"')) return string();
    int begin = at;
    while (at < text.length() && ",]} \n\r\t".indexOf(text.charAt(at)) < 0) ++at;
    String word = text.substring(begin, at);
    switch (word) {
      case "true":
        return true;
      case "false":
        return false;
      case "null":
        return null;
      default:
        return Double.valueOf(word);
    }
  }

  private String string() {
    StringBuilder out = new StringBuilder();
    while (true) {
      char c = text.charAt(at++);
      if (c == '"') return out.toString();
      if (c != '\\') {
        out.append(c);
        continue;
      }
      c = text.charAt(at++);
      int simple = "nrtbf".indexOf(c);
      if (simple >= 0) out.append("\n\r\t\b\f".charAt(simple));
      else if (c == 'u') {
        out.append((char) Integer.parseInt(text.substring(at, at + 4), 16));
        at += 4;
      } else if ("\"\\/".indexOf(c) >= 0) out.append(c);
      else throw wrong();
    }
  }
}
